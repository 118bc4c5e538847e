#!/bin/sh
# The first program of the machine, from its initrd: this host's files below, packages that only the machine has above
# them, and memory for whatever is written.
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
for module in /modules/*; do $bb insmod "$module" || echo "insmod $module failed"; done
for word in $($bb cat /proc/cmdline); do case $word in kvferry.*) eval "${word#kvferry.}" ;; esac; done

options=trans=virtio,version=9p2000.L,msize=524288
$bb mount -t 9p -o "$options,cache=loose,ro" host /host
$bb mount -t tmpfs memory /memory
$bb mount -t 9p -o "$options,cache=loose,ro" layer /layer
$bb mkdir /memory/written /memory/work
$bb mount -t overlay -o "lowerdir=/layer:/host,upperdir=/memory/written,workdir=/memory/work" overlay /root
for folder in proc sys dev; do $bb mount --move "/$folder" "/root/$folder"; done
$bb mount -t 9p -o "$options,cache=none" report "/root$report"
exec $bb switch_root /root /bin/sh "$tree/tests/support/machines/start.sh"
