"""FlashAttention for CUDA graphs of whole steps: what a graph was captured with holds for every step that replays it.

FlashAttention 3 chooses on the host, from the longest query and the longest sequence of a batch, whether the mask is causal (not, if
each query is one token), its tiles, the layout of its scheduler's table and the grid that combines split keys. A graph keeps the
choices of its capture, while vLLM fills the table anew for each step, from that step's own lengths. vLLM 0.24 captures with queries of
`tokens // requests` tokens: then prompts lose their mask in small steps, and in large ones all but the first tokens of each
sequence's combined output stay as they were. Here both lengths are the bounds that hold for every step, at the capture and after it.
With one split of the keys a token's logprob then no longer depends on what else is in its batch.
"""

import copy
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadata, FlashAttentionMetadataBuilder


class BoundedBuilder(FlashAttentionMetadataBuilder):
    """Where whole steps are graphs: metadata with the bounds of all steps where a step has its own lengths."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        if self.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            common_attn_metadata = copy.copy(common_attn_metadata)
            common_attn_metadata.max_query_len = self.vllm_config.scheduler_config.max_num_batched_tokens
            common_attn_metadata.max_seq_len = self.model_config.max_model_len
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class BoundedBackend(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[Any]:
        return BoundedBuilder
