package kv

import (
	"context"

	reqcommon "github.com/llm-d/llm-d-router/pkg/common/request"
	"github.com/llm-d/llm-d-router/pkg/coordinator/pipeline"
)

// KVFerry is the connector's name in the coordinator's configuration.
const KVFerry = "kv-kvferry"

const (
	// FieldKVFerryReference is the field of the reference: of the publication that prefill makes and decode reads.
	FieldKVFerryReference = "kvferry_reference"
	// fieldKVFerryTraceparent is the field of the W3C traceparent under which an engine records its spans.
	fieldKVFerryTraceparent = "kvferry_traceparent"
)

// kvferryKV hands requests over between vLLM engines with KvferryConnector.
//
// In turn, prefill answers with a reference, which decode is sent as it is. At once, whoever chooses the prefill engine
// puts a KVFerryReference into RequestContext.KVTransferParams before either is asked: both are sent this one, and decode
// waits at prefill's home until prefill publishes under it.
//
// A reference is a secret: nothing is logged here.
type kvferryKV struct{}

func (kvferryKV) Name() string { return KVFerry }

func (kvferryKV) PreparePrefillKVParams(_ context.Context, reqCtx *pipeline.RequestContext) map[string]any {
	params := kvferryParams(reqCtx)
	params[reqcommon.FieldDoRemoteDecode] = true
	params[reqcommon.FieldDoRemotePrefill] = false
	return params
}

func (kvferryKV) PrepareDecodeKVParams(_ context.Context, reqCtx *pipeline.RequestContext) map[string]any {
	params := kvferryParams(reqCtx)
	// Prefill has published nothing where it names nothing: decode computes the prompt.
	_, published := params[FieldKVFerryReference]
	params[reqcommon.FieldDoRemoteDecode] = false
	params[reqcommon.FieldDoRemotePrefill] = published
	return params
}

// kvferryParams returns a copy of what is known of the request's transfer. Prefill's traceparent, which its answer has if
// it traces, goes before the client's.
func kvferryParams(reqCtx *pipeline.RequestContext) map[string]any {
	params := make(map[string]any, len(reqCtx.KVTransferParams)+3)
	if traceparent := reqCtx.OriginalHeaders.Get("traceparent"); traceparent != "" {
		params[fieldKVFerryTraceparent] = traceparent
	}
	for name, value := range reqCtx.KVTransferParams {
		params[name] = value
	}
	return params
}
