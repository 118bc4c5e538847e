// Says what a kvferry node server is and which engines it has, and declines a reference: a client in Go, made from the
// protos alone.
//
// usage: example NODE_SERVER [REFERENCE ...]
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	kvferry "kvferry/v1"
)

// reason returns the reason of an error: docs/errors.md says what each means and what to do.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return status.Code(err).String()
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: example NODE_SERVER [REFERENCE ...]")
	}
	// grpc-go before 1.43, which Debian 12 has, knows no other name for it. With TLS: grpc.WithTransportCredentials.
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	// Every call of KVTransfer needs a deadline.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()

	introspection := kvferry.NewIntrospectionClient(connection)
	info, err := introspection.GetServerInfo(ctx, &kvferry.GetServerInfoRequest{})
	if err != nil {
		log.Fatalf("%v [%s]", err, reason(err))
	}
	fmt.Printf("kvferryd %s at %s\n", info.Version, info.Advertise)
	request := &kvferry.ListEnginesRequest{}
	for {
		page, err := introspection.ListEngines(ctx, request)
		if err != nil {
			log.Fatalf("%v [%s]", err, reason(err))
		}
		for _, engine := range page.Engines {
			fmt.Printf("engine %s %x %s\n", engine.Engine.EngineId, engine.Engine.Incarnation, engine.State)
		}
		if request.PageToken = page.NextPageToken; request.PageToken == "" {
			break
		}
	}

	// The contract that this program was made for; see the protos.
	version := &kvferry.Version{ContractRevision: 2, Release: "examples/go"}
	for _, reference := range os.Args[2:] {
		decline := &kvferry.Notification{Kind: &kvferry.Notification_Decline{Decline: &kvferry.Decline{Reference: reference}}}
		notify := &kvferry.NotifyRequest{Notifications: []*kvferry.Notification{decline}, Version: version}
		answer, err := kvferry.NewKVTransferClient(connection).Notify(ctx, notify)
		if err != nil {
			log.Fatalf("%v [%s]", err, reason(err))
		}
		// The call may go well, and the decline be refused.
		if refused := answer.Results[0].GetError(); refused != nil {
			log.Fatalf("%s [%s]", refused.Message, refused.Reason)
		}
		fmt.Println("declined")
	}
}
