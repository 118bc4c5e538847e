// Package request re-states what kvferry's connector uses of llm-d-router's package of this name.
package request

// Fields of kv_transfer_params.
const (
	FieldDoRemotePrefill = "do_remote_prefill"
	FieldDoRemoteDecode  = "do_remote_decode"
)
