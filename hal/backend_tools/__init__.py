"""Optional helpers for writing backends, in the tree or in a separate package.

The helpers are device-independent and stateless. They run at registration, or add one Python call per call of an op.
The contract itself is `hal` and `hal.ops`; a backend needs nothing else.
"""

from .activation import activations_from
from .attention import (
    EXTRAS,
    UNBOUNDED,
    AttentionSpec,
    CuSeqlens,
    attention_spec,
    attention_strides,
    bounded,
    packed_starts,
)
from .compilation import (
    announce,
    build_once,
    cache_directory,
    compiler_version,
    find_compiler,
    intact,
    locked,
    place,
    run_compiler,
)
from .graphs import recorded
from .moe import (
    RouterSpec,
    filled_groups,
    permute_backward,
    permuted_probs,
    router_from,
    router_spec,
    unpermute_from,
)
from .optimizer import (
    AdamWMember,
    AdamWScalars,
    adamw_groups,
    adamw_members,
    adamw_scalars,
    adamw_written,
    in_place_reasons,
)
from .parallel_linear import ParallelLinear, parallel_linear_reasons
from .processor import processor_facts
from .random_draws import (
    bias_dropout_add_from,
    draw_device_reasons,
    draw_reasons,
    draw_rows,
    draw_steps,
    dropout_from,
)
from .rotary import angle_strides, rotary_from
from .signatures import why_not_tensors, with_signature_of
from .tensors import by_dtype, copy_back, host_tensor_reasons, rows_of
from .vocabulary import cross_entropy_from, sharded_embedding, sharded_embedding_gradient

__all__ = [
    "EXTRAS",
    "UNBOUNDED",
    "AdamWMember",
    "AdamWScalars",
    "AttentionSpec",
    "CuSeqlens",
    "ParallelLinear",
    "RouterSpec",
    "activations_from",
    "adamw_groups",
    "adamw_members",
    "adamw_scalars",
    "adamw_written",
    "angle_strides",
    "announce",
    "attention_spec",
    "attention_strides",
    "bias_dropout_add_from",
    "bounded",
    "build_once",
    "by_dtype",
    "cache_directory",
    "compiler_version",
    "copy_back",
    "cross_entropy_from",
    "draw_device_reasons",
    "draw_reasons",
    "draw_rows",
    "draw_steps",
    "dropout_from",
    "filled_groups",
    "find_compiler",
    "host_tensor_reasons",
    "in_place_reasons",
    "intact",
    "locked",
    "packed_starts",
    "parallel_linear_reasons",
    "permute_backward",
    "permuted_probs",
    "place",
    "processor_facts",
    "recorded",
    "rotary_from",
    "router_from",
    "router_spec",
    "rows_of",
    "run_compiler",
    "sharded_embedding",
    "sharded_embedding_gradient",
    "unpermute_from",
    "why_not_tensors",
    "with_signature_of",
]
