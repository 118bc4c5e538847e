"""Are vLLM's caches, once moved, what vLLM itself would have written?

vLLM's allocation makes the caches (`create_kv_cache_views`), its write code fills them, kvferry's plan moves one
engine's bytes into another's poisoned memory, and every byte is compared. There is no GPU: Triton kernels run on CPU
tensors under Triton's interpreter, which shows addresses, not the order of things. "Port" means that a backend's own
code found K and V in the cache, and that vLLM's Triton port of its CUDA kernel wrote them; "reference" that these tests
wrote the bytes, through vLLM's own view where it has one; "source" that the order was only read in vLLM's source.
The interpreter is slow, so the product is sampled: packed K and V take 49 pairs of engines over all six layouts, TP 1,
2, 3, blocks of 16, 32, 48, kernel blocks and padding, each with two of whole and partial, direct and staged reads; the
others take one to three such pairs. All end inside a block.

| family | backends | proof | limits |
|---|---|---|---|
| K and V in each content: bfloat16, fp8; V of another size | Triton (plain, fp8), its diffkv (plain) | kernel | |
| the same | FlashAttention, Flex, AITER, AITER unified | port, bfloat16 | |
| the same | FlashInfer, HPC, FlashAttention's diffkv | source | the first two need their GPU |
| int8, fp8, int4 with a scale for each token and head | Triton | kernel | same format on both sides |
| slots of K and of V | ROCm segmented; B12X | kernel; port | reads to and from packed content, too |
| tiles | ROCm; AITER shuffled | port; kernel, bfloat16 | by head; equal pages |
| NVFP4 | FlashInfer | reference, by vLLM's splitter | heads before tokens; scales by whole pages, order unseen |
| pages of the CPU's kernel | CPU | kernel | by head; equal pages and instruction set |
| latent and rope | CPU; FlashMLA; all others | kernel; reference; source | |
| 656 bytes of fp8, 352 of NVFP4 | sparse MLA | reference | |
| indexer pages of fp8 | DeepSeek V3.2, on CUDA | port | |
"""
