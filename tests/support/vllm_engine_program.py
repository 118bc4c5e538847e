"""One vLLM engine in a process: requests as JSON lines in, answers out. Started by `tests.support.vllm_engines`.

python -m tests.support.vllm_engine_program '{"model": …, "tensor_parallel_size": …, …}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def exchange_embeddings(model: Any) -> None:
    """Let a model, or a rank's part of it, see each token as its neighbour: 2 as 3, and 3 as 2."""
    weight = model.model.embed_tokens.weight.data
    weight.copy_(weight.view(-1, 2, weight.shape[-1]).flip(1).reshape(weight.shape))


def main() -> None:
    # vLLM writes to stdout; the answers go where it cannot.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import msgspec
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.lora.request import LoRARequest

    settings = json.loads(sys.argv[1])
    transfer = settings.pop("kv_transfer", None)
    engine = LLM(
        **settings,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
    )

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def sampling(request: Any) -> Any:
        return SamplingParams(
            n=request.get("n", 1),
            temperature=request.get("temperature", 0),
            seed=request.get("seed"),
            logprobs=request.get("logprobs"),
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": request["params"]} if request["params"] else None,
        )

    def generate(*requests: Any) -> Any:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        adapters = [LoRARequest(*request["adapter"]) if request.get("adapter") else None for request in requests]
        outputs = engine.generate(
            prompts, [sampling(request) for request in requests], use_tqdm=False, lora_request=adapters
        )
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
                "params": output.kv_transfer_params,
                "samples": [list(each.token_ids) for each in output.outputs],
                "logprobs": [
                    sorted((found.logprob for found in place.values()), reverse=True)
                    for place in output.outputs[0].logprobs or ()
                ],
            }
            for output in outputs
        ]

    def abort(request: Any, steps: int) -> Any:
        """Take a request, make some steps, abort it, and step until nothing is left of it."""
        inner = engine.llm_engine
        inner.add_request("aborted", {"prompt_token_ids": request["prompt"]}, sampling(request))
        for _ in range(steps):
            inner.step()
        inner.abort_request(["aborted"])
        while inner.has_unfinished_requests():
            inner.step()

    def hints_of(request: Any) -> dict[str, Any]:
        """The hints of a request as vLLM's front ends hand them to the engine, which has them since 0.32."""
        if not request.get("hints"):
            return {}
        from vllm.v1.kv_hints import KvHintsEnvelope

        return {"kv_hints": msgspec.convert(request["hints"], KvHintsEnvelope)}

    def begin(request: Any, steps: int) -> None:
        """Take a request, and make some steps."""
        inner = engine.llm_engine
        inner.add_request("begun", {"prompt_token_ids": request["prompt"]}, sampling(request), **hints_of(request))
        for _ in range(steps):
            inner.step()

    def begin_answer(request: Any, tokens: int) -> Any:
        """Take a request, and step until it has so many tokens, or all; the tokens, and how many of its prompt were
        cached."""
        begin(request, 0)
        said: dict[str, Any] = {"tokens": [], "cached": None}
        while len(said["tokens"]) < min(tokens, request["max_tokens"]):
            for output in engine.llm_engine.step():
                said = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
        return said

    def end_begun() -> Any:
        """Make the steps that the request needs that was begun; its tokens and its finish."""
        said: Any = None
        while engine.llm_engine.has_unfinished_requests():
            for output in engine.llm_engine.step():
                said = [list(output.outputs[0].token_ids), output.outputs[0].finish_reason]
        return said

    def abort_begun() -> None:
        """Abort the request that was begun."""
        engine.llm_engine.abort_request(["begun"])
        end_begun()

    def metric(name: str) -> float:
        """The sum of a counter over its labels."""
        return float(sum(found.value for found in engine.get_metrics() if found.name == name))

    def exchange_tokens() -> None:
        """Take each token for its neighbour, until this is called again."""
        engine.apply_model(exchange_embeddings)

    commands: dict[str, Callable[..., Any]] = {
        "generate": generate,
        "abort": abort,
        "begin": begin,
        "begin_answer": begin_answer,
        "abort_begun": abort_begun,
        "end_begun": end_begun,
        "metric": metric,
        "exchange_tokens": exchange_tokens,
        "reset_prefix_cache": engine.reset_prefix_cache,
    }
    say("ready")
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            say(commands[command](*arguments))
        except Exception as error:
            say({"error": repr(error)})


if __name__ == "__main__":
    main()
