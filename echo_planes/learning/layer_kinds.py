"""Kinds of a model's layers, read from its settings, and whether all of them support packed rows.

In a packed row a token attends to all that comes before it in its trajectory (`tree_attention`), whatever the
layer: a layer would lose its sliding window or chunk. A layer that carries a state along the row would carry
it from one trajectory into the next.
"""

from __future__ import annotations

from echo_planes.errors import ModelError

# Attention with a mask of its own, and the setting that limits how many tokens it looks back.
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Layers that compute each token by itself.
POINTWISE = frozenset({"moe", "mlp", "sparse", "dense"})
# Causal layers that carry a state or a selection of keys along the row. They are right only for a row with a
# single trajectory and its padding last.
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
    """Return the kind of each layer in transformers' words; a single entry stands for layers all alike.

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
    """Return whether every layer sees all before a token, in trajectories of at most `longest` tokens.

    A window of at least `longest` tokens limits nothing. Where the result is False, a row must hold one
    trajectory and use the model's own masks.

    Raises:
        ModelError: a layer's kind is not known to be causal.
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


def turns_alike(settings: object) -> bool:
    """Return whether rotary positions turn alike whatever the length of a call.

    Some stretch them by the largest position of the call, of which ranks that share a row see parts.
    """
    found = getattr(settings, "rope_parameters", None) or {}
    each = [found, *(one for one in found.values() if isinstance(one, dict))]
    kinds = {str(one.get("rope_type", "default")) for one in each}
    return not any(kind == "longrope" or "dynamic" in kind for kind in kinds)
