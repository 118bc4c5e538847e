#!/bin/sh
# The second program of the machine, among this host's files: what a system sets up at its start, and the cards. Card N
# is the interface eth(N+1) with the address 10.77.N.HOST and the RDMA device rxeN; eth0 leads to whoever started it.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
for word in $(cat /proc/cmdline); do case $word in kvferry.*) eval "${word#kvferry.}" ;; esac; done
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /run
# Not above this host's /tmp, where the checkout may be.
mkdir -m 1777 /run/tmp
export TMPDIR=/run/tmp
hostname "machine$number"
ulimit -l unlimited
ulimit -n 65536
ip link set lo up
ip address add 10.0.2.15/24 dev eth0
ip link set eth0 up
card=0
while [ -e "/sys/class/net/eth$((card + 1))" ]; do
	ip address add "10.77.$card.$number/24" dev "eth$((card + 1))"
	ip link set "eth$((card + 1))" up
	rdma link add "rxe$card" type rxe netdev "eth$((card + 1))"
	card=$((card + 1))
done
cd "$tree" || exit
"$python" -m tests.support.machines.guest "$port"
echo o >/proc/sysrq-trigger
sleep 60
