package kv

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// maxKVFerryName is the most bytes of an address and of an engine_id.
	maxKVFerryName = 256
	// kvferryKeyBytes is the size of a reference's key.
	kvferryKeyBytes = 16
)

// KVFerryReference makes a reference before prefill is asked: one for each request, and for each attempt of one. home is
// the address of the prefill engine's node server, empty where decode engines have a directory; engineID names the engine,
// or a deployment whose engines are named by it, "_dp" and their data-parallel rank.
func KVFerryReference(home, engineID string, dataParallelRank uint32) (string, error) {
	if len(home) > maxKVFerryName || !utf8.ValidString(home) {
		return "", fmt.Errorf("home: %q is no text of at most %d bytes", home, maxKVFerryName)
	}
	named := engineID != "" && len(engineID) <= maxKVFerryName && utf8.ValidString(engineID)
	if !named || strings.IndexFunc(engineID, unicode.IsControl) >= 0 {
		return "", fmt.Errorf("engine_id: %q is no name of 1 to %d bytes", engineID, maxKVFerryName)
	}
	random := make([]byte, 2*kvferryKeyBytes)
	if _, err := rand.Read(random); err != nil {
		return "", fmt.Errorf("kvferry reference: %w", err)
	}
	key, routerKey := random[:kvferryKeyBytes], hex.EncodeToString(random[kvferryKeyBytes:])
	return encodeKVFerryReference(home, engineID, key, routerKey, dataParallelRank), nil
}

// encodeKVFerryReference returns the string of a kvferry.v1.Reference. Its few fields are written here, since the
// coordinator needs nothing else of kvferry's protos.
func encodeKVFerryReference(home, engineID string, key []byte, routerKey string, dataParallelRank uint32) string {
	var message []byte
	for _, field := range []struct {
		number uint64
		value  string
	}{{1, home}, {2, engineID}, {6, string(key)}, {7, routerKey}} {
		if field.value != "" {
			message = binary.AppendUvarint(message, field.number<<3|2)
			message = binary.AppendUvarint(message, uint64(len(field.value)))
			message = append(message, field.value...)
		}
	}
	if dataParallelRank != 0 {
		message = binary.AppendUvarint(message, 8<<3)
		message = binary.AppendUvarint(message, uint64(dataParallelRank))
	}
	return "kvf1." + base64.RawURLEncoding.EncodeToString(message)
}
