"""Mistakes in geometry files, with the path that their refusal names, and junk to put anywhere."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from tests.geometry.documents import LLAMA, MAMBA, document


def changed(path: str, value: object, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A file with one value changed, added or (with `...`) removed; list indices are numbers."""
    found = copy.deepcopy(LLAMA if base is None else base)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = found
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return found


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (changed("engine_id", ...), "engine_id"),
    (changed("engine_id", ""), "engine_id"),
    (changed("engine_id", "\ud800"), "engine_id"),
    (changed("model", ...), "model"),
    (changed("model", []), "model"),
    (changed("model.layers", 0), "model.layers"),
    (changed("model.kv_heads", ...), "model.kv_heads"),
    (changed("model.head_dim", ...), "model.head_dim"),
    (changed("model.head_dim", 128.0), "model.head_dim"),
    (changed("model.dtype", ...), "model.dtype"),
    (changed("model.dtype", "bf16"), "model.dtype"),
    (changed("model.attention", "mqa"), "model.attention"),
    (changed("model.attention", "mla"), "model.kv_heads"),
    (changed("model.latent_dim", 512), "model.latent_dim"),
    (
        document(
            model={"layers": 1, "attention": "mla", "latent_dim": 8, "dtype": "uint8"}, components=[{"name": "rope"}]
        ),
        "model.rope_dim",
    ),
    (changed("model.heads", 8), "model.heads"),
    (changed("tp_size", 0), "tp_size"),
    (changed("tp_size", "4"), "tp_size"),
    (changed("tp_size", True), "tp_size"),
    (changed("pp_size", 33), "pp_size"),
    (changed("pp_size", 2000), "pp_size"),
    (changed("layout", "hnd"), "layout"),
    (changed("block_size", ...), "block_size"),
    (changed("num_blocks", ...), "num_blocks"),
    (changed("num_blocks", 2**31), "num_blocks"),
    (changed("num_block", 10), "num_block"),
    (changed("kv", "together"), "kv"),
    (changed("tensors", "one"), "tensors"),
    (changed("shards", [[0, 4], [4, 8]]), "shards"),
    (changed("shards", [[0, 2], [2, 4], [4, 6], [6, 9]]), "shards[3]"),
    (changed("shards", [[0, 2], [2, 4], [4, 4], [6, 8]]), "shards[2]"),
    (changed("stages", [[0, 33]]), "stages[0]"),
    (changed("stages", []), "stages"),
    (document(layout=None, order=["layer", "block", "unit", "token"]), "order"),
    (changed("order", ["layer", "block", "unit", "token", "kv"]), "order[4]"),
    (changed("order", ["layer", "block", "component", "unit", "token"]), "layout"),
    (changed("layout", None), "layout"),
    (changed("stages", [[0, 32], [0]]), "stages[1][1]"),
    (changed("page_size", 5), "page_size"),
    (changed("page_size", 32), "page_size"),
    (changed("token_shard", {"count": 3}), "token_shard.count"),
    (changed("token_shard", {"count": 2, "step": 1}), "token_shard.step"),
    (changed("tokens_per_state", 0), "tokens_per_state"),
    (changed("tokens_per_state", [1, 2, 3]), "tokens_per_state"),
    (changed("tokens_per_state", 3), "block_size"),
    ({**changed("tokens_per_state", 8), "page_size": 4}, "page_size"),
    (changed("kind", "sliding"), "kind"),
    (changed("kind", "window"), "window"),
    (changed("window", 128), "window"),
    (changed("kind", "state"), "block_size"),
    (changed("null_block", 1024), "null_block"),
    (changed("layers", [32]), "layers[0]"),
    (changed("layers", [[0, 4], 3]), "layers[1]"),
    (changed("layers", []), "layers"),
    (changed("layer_name", "layer"), "layer_name"),
    (changed("granule", "block"), "granule"),
    (changed("optional", 1), "optional"),
    (changed("memory", "hbm"), "memory"),
    (changed("identity", {"model": 8}), "identity.model"),
    (changed("rows", "rows_first"), "rows"),
    (changed("components", []), "components"),
    (changed("components", [{"content": 4}]), "components[0].name"),
    (changed("components", [{"name": "key"}, {"name": "key"}]), "components[0].name"),
    (changed("components", [{"name": "key", "rows": 3}]), "components[0].rows"),
    (changed("components", [{"name": "key", "unit": 3}]), "components[0].unit"),
    (changed("components", [{"name": "key", "layers": [40]}]), "components[0].layers"),
    (changed("groups", []), "groups"),
    (changed("groups", [{}]), "groups[0].name"),
    (changed("groups", [{"name": "a"}, {"name": "a"}]), "groups[0].name"),
    (changed("groups", [{"name": "a", "tp_size": 2}]), "groups[0].tp_size"),
    ({**changed("groups", [{"name": "a"}]), "pool": "x"}, "pool"),
    (changed("groups.1.components", ..., MAMBA), "groups[1].components"),
    (changed("groups.1.components.0.units", ..., MAMBA), "groups[1].components[0].units"),
    (changed("groups.1.block_size", 16, MAMBA), "groups[1].block_size"),
    (changed("groups.1.kv", "packed", MAMBA), "groups[1].kv"),
    (changed("groups.1.num_blocks", ..., MAMBA), "groups[1].num_blocks"),
    (changed("groups.1.components.1.tokens_per_state", 2, MAMBA), "groups[1].components[1].tokens_per_state"),
    (
        {**changed("shards", [[0, 2], [2, 4], [4, 6], [6, 8]]), "groups": [{"name": "a", "kv_heads": 4}]},
        "groups[0].shards",
    ),
    ({**changed("groups", [{"name": "a", "shards": [[0, 2], [2, 4], [4, 6], [6, 8]]}]), "shards": [[0, 8]]}, "shards"),
]
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
