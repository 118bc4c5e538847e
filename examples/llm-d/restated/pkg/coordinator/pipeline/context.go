// Package pipeline re-states what kvferry's connector uses of llm-d-router's package of this name.
package pipeline

import "net/http"

// RequestContext is what the connector reads of a request.
type RequestContext struct {
	// OriginalHeaders are those of the client's request.
	OriginalHeaders http.Header
	// KVTransferParams are those of prefill's answer, once there is one.
	KVTransferParams map[string]any
}
