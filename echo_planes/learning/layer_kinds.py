"""Layers of a model by kind, read from its settings, and whether packed rows are right for all of them.

transformers takes a mask of four dimensions as it is, in every layer. A packed row's mask (causal within its
units) therefore stands in for a layer's own: a sliding window or a chunk is lost, and a layer that carries a
state along the row never looks at a mask.
"""

from __future__ import annotations

from echo_planes.errors import ModelError

# Attention with a mask of its own, and the setting that bounds how far it looks back, in tokens.
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Layers in which tokens do not meet.
POINTWISE = frozenset({"moe", "mlp", "sparse", "dense"})
# Causal, but a state or a choice of keys runs along the row: right for a single trajectory, padding last.
ROW_BOUND = frozenset(
    {
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "recurrent",
    }
)


def layer_kinds(settings: object) -> list[str]:
    """Kind of each layer, or of all where they are alike, in transformers' words.

    Args:
        settings: text configuration of a Hugging Face model.
    """
    kinds = getattr(settings, "layer_types", None) or getattr(settings, "block_types", None)
    if kinds:
        return ["full_attention" if kind == "attention" else str(kind) for kind in kinds]
    windowed = bool(getattr(settings, "sliding_window", None)) and getattr(
        settings, "use_sliding_window", True
    )
    return ["sliding_attention" if windowed else "full_attention"]


def may_pack(settings: object, longest: int) -> bool:
    """Whether one causal mask serves every layer, for trajectories of at most `longest` tokens.

    A window that `longest` tokens fit into is none. Where the answer is False, a row of one trajectory with
    the model's own masks is right.

    Raises:
        ModelError: a layer of a kind that is not known to be causal.
    """
    kinds = sorted(set(layer_kinds(settings)) - POINTWISE)
    unknown = [kind for kind in kinds if kind not in {"full_attention", *WINDOWS, *ROW_BOUND}]
    if unknown:
        raise ModelError(
            f"the model is not supported: its layers of kind '{unknown[0]}' are not known to be causal; take "
            "a model whose layer_types in config.json are all known"
        )
    for kind in kinds:
        window = getattr(settings, WINDOWS[kind], None) if kind in WINDOWS else None
        if kind in ROW_BOUND or (kind in WINDOWS and not (isinstance(window, int) and window >= longest)):
            return False
    return True
