// Prints kv_transfer_params as the connector makes them, for requests by hand:
//
//	params prefill KNOWN                 those for prefill
//	params decode KNOWN                  those for decode
//	params ahead HOME ENGINE_ID RANK     what is known if a reference is made before prefill is asked
//
// KNOWN is JSON: the kv_transfer_params of prefill's answer, what `ahead` has printed, or null. The variable TRACEPARENT
// stands for the header of the client's request.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"

	"github.com/llm-d/llm-d-router/pkg/coordinator/pipeline"

	"kvferry/llmd/kv"
)

var errUsage = errors.New("usage: params prefill KNOWN | decode KNOWN | ahead HOME ENGINE_ID RANK")

// request returns what the coordinator would know of a request.
func request(known string) (*pipeline.RequestContext, error) {
	found := &pipeline.RequestContext{OriginalHeaders: http.Header{}}
	if traceparent := os.Getenv("TRACEPARENT"); traceparent != "" {
		found.OriginalHeaders.Set("traceparent", traceparent)
	}
	return found, json.Unmarshal([]byte(known), &found.KVTransferParams)
}

func params(what string, arguments []string) (map[string]any, error) {
	if what == "ahead" && len(arguments) == 3 {
		rank, err := strconv.ParseUint(arguments[2], 10, 32)
		if err != nil {
			return nil, err
		}
		reference, err := kv.KVFerryReference(arguments[0], arguments[1], uint32(rank))
		return map[string]any{kv.FieldKVFerryReference: reference}, err
	}
	if len(arguments) != 1 {
		return nil, errUsage
	}
	connector, err := kv.Build(kv.KVFerry)
	if err != nil {
		return nil, err
	}
	found, err := request(arguments[0])
	if err != nil {
		return nil, err
	}
	switch what {
	case "prefill":
		return connector.PreparePrefillKVParams(context.Background(), found), nil
	case "decode":
		return connector.PrepareDecodeKVParams(context.Background(), found), nil
	default:
		return nil, errUsage
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 {
		return errUsage
	}
	made, err := params(arguments[0], arguments[1:])
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(made)
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}
