"""The shape of a model's layers, and what of it costs and weighs: FLOPs, weights, activations.

FLOPs are those of the forward pass: 2 for each weight that a token meets, and 2 for each pair of
tokens, head and channel of a key and of a value. The backward pass is twice that and changes no
ratio. Attention of causal layers counts half of its pairs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from federation.model.cost import CostSpec, EncoderCost, SpanTerm, WindowTerm
from msd_client.contract.media_fields import Modality


@dataclass(frozen=True)
class Attention:
    """Heads of a layer; with ranks it is multi-head latent attention (DeepSeek-V2, 2405.04434)."""

    heads: int
    kv_heads: int
    key_width: int
    """Channels of a head's query and key."""
    value_width: int
    query_rank: int = 0
    """Channels that queries are projected down to first; 0: not."""
    kv_rank: int = 0
    """Channels that keys and values are projected down to first; 0: not."""
    rope_width: int = 0
    """With `kv_rank`: the channels of a key that all heads share."""

    def weights(self, hidden: int) -> int:
        """Return the weights of its projections."""
        queries = self.heads * self.key_width
        output = self.heads * self.value_width * hidden
        found = (
            self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        ) + output
        if not self.kv_rank:
            return found + hidden * self.kv_heads * (self.key_width + self.value_width)
        up = self.heads * (self.key_width - self.rope_width + self.value_width)
        return found + hidden * (self.kv_rank + self.rope_width) + self.kv_rank * up

    @property
    def pair_flops(self) -> int:
        """FLOPs of half of a pair, as causal layers have them: n tokens cost n * n times this."""
        return self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class FeedForward:
    """The MLP of a layer, dense or of experts."""

    inner: int
    matrices: int
    """3 where it is gated, else 2."""
    experts: int = 0
    active: int = 1
    """Experts that a token goes through."""
    shared_inner: int = 0
    """Inner width of all experts together that every token goes through."""

    def weights(self, hidden: int) -> int:
        """Return all weights."""
        return self._count(hidden, max(1, self.experts))

    def active_weights(self, hidden: int) -> int:
        """Return the weights that a token meets, the router's among them."""
        return self._count(hidden, self.active if self.experts else 1)

    def _count(self, hidden: int, experts: int) -> int:
        return hidden * (self.matrices * (self.inner * experts + self.shared_inner) + self.experts)


@dataclass(frozen=True)
class Layer:
    """One block."""

    attention: Attention
    feed_forward: FeedForward
    window: int = 0
    """Tokens (of an encoder: units) that a token attends to; 0: all."""


@dataclass(frozen=True)
class DecoderShape:
    """A causal language model."""

    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    is_tied: bool = False
    """True where the output layer is the embedding."""
    positions: int = 0
    """Learned position embeddings."""
    has_dropout: bool = False
    """True where the outputs of attention and MLP are dropped out."""

    def parameters(self) -> int:
        """Return the model's parameters, biases left out."""
        tables = self.hidden * (self.vocabulary * (1 if self.is_tied else 2) + self.positions)
        return tables + self.hidden + _layer_parameters(self.hidden, self.layers)

    def active_parameters(self) -> int:
        """Return the parameters that a token meets, with the embedding."""
        idle = sum(
            layer.feed_forward.weights(self.hidden) - layer.feed_forward.active_weights(self.hidden)
            for layer in self.layers
        )
        return self.parameters() - idle


@dataclass(frozen=True)
class EncoderShape:
    """An encoder of pictures or sounds; a unit is a patch, or a frame."""

    hidden: int
    layers: tuple[Layer, ...]
    unit_weights: int
    """Weights that each unit meets before the layers: patch embedding, convolutions."""
    position_units: int = 1
    """Units that become one position of the layers: 2 behind Whisper's second convolution."""
    merge_units: int = 1
    """Positions that the projector merges into one token."""
    merge_weights: int = 0
    """Weights that each token of the projector meets."""
    first_weights: int = 0
    """Of convolutions whose outputs are fewer than units: all of them, to count parameters."""
    learned_positions: int = 0

    def parameters(self) -> int:
        """Return the encoder's parameters, biases left out."""
        first = self.first_weights or self.unit_weights
        rest = self.merge_weights + self.learned_positions * self.hidden
        return first + rest + _layer_parameters(self.hidden, self.layers)


def _layer_parameters(hidden: int, layers: tuple[Layer, ...]) -> int:
    """Return the weights of layers with two norms each."""
    return sum(
        layer.attention.weights(hidden) + layer.feed_forward.weights(hidden) + 2 * hidden
        for layer in layers
    )


def decoder_cost(shape: DecoderShape) -> CostSpec:
    """Return the forward FLOPs of a segment, no factor taken out; window terms by their length."""
    hidden = shape.hidden
    weights = hidden * shape.vocabulary
    pairs: Counter[int] = Counter()
    for layer in shape.layers:
        weights += layer.attention.weights(hidden) + layer.feed_forward.active_weights(hidden)
        pairs[layer.window] += layer.attention.pair_flops
    windowed = tuple(WindowTerm(window, pairs[window]) for window in sorted(pairs) if window)
    return CostSpec("transformer", 2 * weights, pairs[0], windowed)


def encoder_cost(shape: EncoderShape, modality: Modality, item_units: int) -> EncoderCost:
    """Return the forward FLOPs of media, in the unit of `decoder_cost`.

    Args:
        shape: The encoder.
        modality: What it encodes here.
        item_units: Typical units of what attends to itself: an image, a frame pair of a video, a
            window of sound.
    """
    weights, pairs = 0, Counter[int]()
    for layer in shape.layers:
        weights += layer.attention.weights(shape.hidden)
        weights += layer.feed_forward.active_weights(shape.hidden)
        span = min(layer.window or item_units, item_units)
        pairs[span] += 2 * layer.attention.pair_flops
    linear = 2 * shape.unit_weights + 2 * weights // shape.position_units
    linear += 2 * shape.merge_weights // (shape.merge_units * shape.position_units)
    spans = tuple(
        SpanTerm(span, pairs[span] // shape.position_units**2) for span in sorted(pairs) if span
    )
    return EncoderCost(modality, linear, spans)


def decoder_activations(shape: DecoderShape, *, is_recomputed: bool = False) -> int:
    """Return the bytes that a token keeps for the backward pass, 16 bits a value.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv 2205.05198), section 4.1, for layers of other shapes than GPT's: what each matrix product
    and non-linearity keeps of its inputs, a byte per value for each dropout mask, 4 bytes a logit.
    For GPT that is the paper's 34 * hidden a layer. Attention is fused (FlashAttention), so the
    paper's term in heads * tokens is not there.

    Args:
        shape: The model.
        is_recomputed: Only the input of each layer is kept, and one layer at a time in whole.
    """
    layers = [_layer_bytes(shape.hidden, layer) for layer in shape.layers]
    if shape.has_dropout:
        layers = [size + 2 * shape.hidden for size in layers]
    output = 4 * shape.hidden + 4 * shape.vocabulary
    return output + _kept(layers, shape.hidden, is_recomputed=is_recomputed)


def encoder_activations(shape: EncoderShape, *, is_recomputed: bool = False) -> int:
    """Return the bytes that a unit keeps for the backward pass; see `decoder_activations`."""
    layers = [_layer_bytes(shape.hidden, layer) for layer in shape.layers]
    kept = _kept(layers, shape.hidden, is_recomputed=is_recomputed)
    # The projector keeps its merged input, its non-linearity's input and output: 3 * hidden.
    projector = 6 * shape.hidden if shape.merge_weights else 0
    return -(-(kept + projector) // shape.position_units) + 2 * shape.hidden


def _kept(layers: list[int], hidden: int, *, is_recomputed: bool) -> int:
    if not is_recomputed:
        return sum(layers)
    return 2 * hidden * len(layers) + max(layers, default=0)


def _layer_bytes(hidden: int, layer: Layer) -> int:
    """Return what a token keeps in a layer: inputs of norms and products, 2 bytes a value."""
    attention, mlp = layer.attention, layer.feed_forward
    keys = attention.heads if attention.kv_rank else attention.kv_heads
    values = 4 * hidden + attention.heads * (attention.key_width + attention.value_width)
    values += keys * (attention.key_width + attention.value_width)
    values += attention.query_rank + attention.kv_rank
    # Gated: inputs of the activation and of both sides of the product, and the product.
    inner = (4 if mlp.matrices == 3 else 2) * (
        mlp.inner * (mlp.active if mlp.experts else 1) + mlp.shared_inner
    )
    routed = hidden * mlp.active if mlp.experts else 0
    return 2 * (values + inner + routed + mlp.experts)
