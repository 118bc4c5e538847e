// Package kv has kvferry's connector for llm-d's coordinator. This file re-states the interface and the function that the
// coordinator has in its own package kv, so that the connector builds and is tested without it.
package kv

import (
	"context"
	"fmt"

	"github.com/llm-d/llm-d-router/pkg/coordinator/pipeline"
)

// Connector says what kv_transfer_params prefill and decode are sent. Many requests share one.
type Connector interface {
	Name() string
	PreparePrefillKVParams(ctx context.Context, reqCtx *pipeline.RequestContext) map[string]any
	PrepareDecodeKVParams(ctx context.Context, reqCtx *pipeline.RequestContext) map[string]any
}

// Build returns the connector of a name.
func Build(name string) (Connector, error) {
	switch name {
	case KVFerry:
		return kvferryKV{}, nil
	default:
		return nil, fmt.Errorf("unknown kv_connector: %q", name)
	}
}
