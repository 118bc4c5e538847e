"""A model that SGLang gives images on CPU, and images."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

from tests.support.vllm_engines import VOCABULARY

SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in a text."""
ARGUMENTS = ["--mm-attention-backend", "sdpa"]
"""What an instance's command line has, since its default for images needs a device."""


def make_vision_model(folder: Path) -> Path:
    """A model of random weights, with a tokenizer of a word for each token: Qwen2-VL."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    words = {f"w{token}": token for token in range(VOCABULARY - len(SPECIAL))}
    made: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    end, vision_start, vision_end, image_pad, video_pad = map(tokenizer.convert_tokens_to_ids, SPECIAL)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": end,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=image_pad,
        video_token_id=video_pad,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        initializer_range=0.2,
    )
    model: Any = transformers.Qwen2VLForConditionalGeneration(config)
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    # SGLang reads it under the name that it had in files of older releases of transformers.
    written = json.loads((folder / "config.json").read_text())
    written["vision_config"]["in_chans"] = 3
    (folder / "config.json").write_text(json.dumps(written))
    processor: Any = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    processor.save_pretrained(folder)
    return folder


def picture(seed: int) -> str:
    """An image of random colours, as requests carry it. All have as many tokens."""
    written = b"P6 84 56 255\n" + random.Random(seed).randbytes(84 * 56 * 3)
    return "data:image/x-portable-pixmap;base64," + base64.b64encode(written).decode()
