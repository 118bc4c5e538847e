package kv

import (
	"bytes"
	"context"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/llm-d/llm-d-router/pkg/coordinator/pipeline"
)

const (
	clients  = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	prefills = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
)

func TestKVFerry_Params(t *testing.T) {
	traced := http.Header{"Traceparent": {clients}}
	cases := []struct {
		name        string
		headers     http.Header
		known       map[string]any
		wantPrefill map[string]any
		wantDecode  map[string]any
	}{
		{
			name:        "nothing is known before prefill is asked, and decode computes where prefill has published nothing",
			wantPrefill: map[string]any{"do_remote_decode": true, "do_remote_prefill": false},
			wantDecode:  map[string]any{"do_remote_decode": false, "do_remote_prefill": false},
		},
		{
			name: "prefill's answer is forwarded, with fields that later versions may have",
			known: map[string]any{
				"do_remote_decode": false, "do_remote_prefill": true, "kvferry_reference": "kvf1.x", "kvferry_later": 1.0,
			},
			wantPrefill: map[string]any{
				"do_remote_decode": true, "do_remote_prefill": false, "kvferry_reference": "kvf1.x", "kvferry_later": 1.0,
			},
			wantDecode: map[string]any{
				"do_remote_decode": false, "do_remote_prefill": true, "kvferry_reference": "kvf1.x", "kvferry_later": 1.0,
			},
		},
		{
			name:    "a reference made ahead goes to both, with the client's traceparent",
			headers: traced,
			known:   map[string]any{"kvferry_reference": "kvf1.x"},
			wantPrefill: map[string]any{
				"do_remote_decode": true, "do_remote_prefill": false,
				"kvferry_reference": "kvf1.x", "kvferry_traceparent": clients,
			},
			wantDecode: map[string]any{
				"do_remote_decode": false, "do_remote_prefill": true,
				"kvferry_reference": "kvf1.x", "kvferry_traceparent": clients,
			},
		},
		{
			name:    "prefill's traceparent goes before the client's",
			headers: traced,
			known:   map[string]any{"kvferry_reference": "kvf1.x", "kvferry_traceparent": prefills},
			wantPrefill: map[string]any{
				"do_remote_decode": true, "do_remote_prefill": false,
				"kvferry_reference": "kvf1.x", "kvferry_traceparent": prefills,
			},
			wantDecode: map[string]any{
				"do_remote_decode": false, "do_remote_prefill": true,
				"kvferry_reference": "kvf1.x", "kvferry_traceparent": prefills,
			},
		},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c, err := Build(KVFerry)
			if err != nil {
				t.Fatalf("Build(%q): %v", KVFerry, err)
			}
			if c.Name() != KVFerry {
				t.Fatalf("Name() = %q, want %q", c.Name(), KVFerry)
			}
			known := len(tc.known)
			reqCtx := &pipeline.RequestContext{OriginalHeaders: tc.headers, KVTransferParams: tc.known}
			if got := c.PreparePrefillKVParams(context.Background(), reqCtx); !reflect.DeepEqual(got, tc.wantPrefill) {
				t.Errorf("prefill params:\n got=%v\nwant=%v", got, tc.wantPrefill)
			}
			if got := c.PrepareDecodeKVParams(context.Background(), reqCtx); !reflect.DeepEqual(got, tc.wantDecode) {
				t.Errorf("decode params:\n got=%v\nwant=%v", got, tc.wantDecode)
			}
			// A pipeline step that fails is repeated with the same context.
			if len(tc.known) != known || tc.known["do_remote_decode"] == true {
				t.Errorf("the request's context was changed: %v", tc.known)
			}
		})
	}
}

func TestKVFerryReference_Encoding(t *testing.T) {
	key := make([]byte, kvferryKeyBytes)
	for index := range key {
		key[index] = byte(index)
	}
	// As kvferry's own router_reference makes them.
	want := "kvf1.Cg0xMC4wLjAuMTo3NDIzEglwcmVmaWxsLTAyEAABAgMEBQYHCAkKCwwNDg86CXJlcXVlc3QtMUCsAg"
	if got := encodeKVFerryReference("10.0.0.1:7423", "prefill-0", key, "request-1", 300); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	want = "kvf1.EgLDqTIQa2tra2tra2tra2tra2trazoBcg"
	if got := encodeKVFerryReference("", "é", bytes.Repeat([]byte("k"), kvferryKeyBytes), "r", 0); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestKVFerryReference_Arguments(t *testing.T) {
	long := strings.Repeat("x", maxKVFerryName)
	seen := map[string]bool{}
	for _, named := range [][2]string{{"", "e"}, {"", "e"}, {"unix:/run/node.sock", "prefill 0"}, {long, long}} {
		reference, err := KVFerryReference(named[0], named[1], 1)
		if err != nil || !strings.HasPrefix(reference, "kvf1.") || seen[reference] {
			t.Errorf("KVFerryReference(%q): %q, %v", named, reference, err)
		}
		seen[reference] = true
	}
	for _, named := range [][2]string{{long + "x", "e"}, {"\xff", "e"}, {"", ""}, {"", long + "x"}, {"", "\xff"}, {"", "a\nb"}} {
		if reference, err := KVFerryReference(named[0], named[1], 1); err == nil {
			t.Errorf("KVFerryReference(%q): %q, want an error", named, reference)
		}
	}
}
