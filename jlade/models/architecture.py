"""The architecture of a model: a description that its layers read."""

import dataclasses
from typing import NamedTuple

from jlade.models import rotary
from jlade.models.attention import Variation
from jlade.models.base import num_entries

NORMS = ("rms", "rms_plus_one", "rms_late", "layer", "layer_plus_one")
# Of each head, with weights for each (Command R+), of all heads together (OLMo 2), after the rotation (HunYuan), of
# rotated heads without weights (Llama 4)
QK_NORMS = ("head", "each", "whole", "rotated", "weightless")
# How the weights of a token's experts follow from the router's scores; that of "sigmoid" is of the one expert's input.
# Those of `SCORED` are sigmoids (DeepSeek V3) or probabilities (DeepSeek V2), by which experts are chosen too
SCORED = ("sigmoids", "probabilities")
ROUTINGS = ("softmax", "sparsemixer", "sigmoid", *SCORED)
# Rules of recurrent layers: the gated delta rule (Qwen3-Next), with a decay for each channel of keys too (Kimi Linear),
# Mamba-2 (Granite 4), and a convolution alone (LFM2)
RULES = DELTA, CHANNEL_DELTA, STATE_SPACE, CONVOLUTION = "delta", "channel_delta", "state_space", "convolution"
AFTER_GATE, BEFORE_GATE = "after_gate", "before_gate"  # places of the norm of Mamba-2
# "relu2" is the square of a ReLU (Nemotron H), "xielu" has learned rates (Apertus), and the last one is that of a gate
# and a product (GPT-OSS)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "xielu", "clipped_silu")

GATES = ("sigmoid", "softplus")  # functions of `jax.nn`, of the gates of attention (Qwen3-Next, Laguna)


class Heads(NamedTuple):
    """Heads for keys and values."""

    number: int  # KH
    size: int  # D


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Rule and sizes of recurrent layers: see `jlade.models.layers.recurrent`.

    Queries, keys and values of a convolution alone are of the model's width, and each element is a head.
    """

    rule: str  # one of `RULES`
    key_heads: int  # of queries and keys
    value_heads: int  # a multiple
    key_size: int
    value_size: int
    taps: int  # tokens that the convolution sees, its own included
    filter_bias: bool = False  # of the convolution
    norm_place: str | None = AFTER_GATE  # of Mamba-2, or `BEFORE_GATE`; None for a gate without a norm (Falcon-H1)
    beta_scale: float = 1.0  # of the share of a correction that a delta rule makes: 2 lets the state change its sign
    norm_eps: float | None = None  # of the norm, None for that of the model (OLMo Hybrid)
    # Of decays for each channel: elements of the latents that gates and decays are products of, None for hidden states
    gate_rank: int | None = None
    least_decay: float | None = None  # the lower bound of their logarithms, None for none (Ling 3)

    @property
    def corrects(self) -> bool:
        """Whether an update is the difference of a value from what the state has of it."""
        return self.rule in (DELTA, CHANNEL_DELTA)

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.keys if self.rule == CHANNEL_DELTA else self.value_heads

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def has_memory(self) -> bool:
        """Whether a layer keeps more of the text than the convolution's last inputs."""
        return self.rule != CONVOLUTION

    @property
    def channels(self) -> int:
        """C, the inputs of the convolution."""
        return 2 * self.keys + self.values if self.has_memory else self.values


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Factors of numbers in all layers (Falcon-H1).

    Each scales the product of a matrix: `attention_` and `recurrent_` precede the names of those of mixers. Those of
    inputs scale the normed hidden states that attention, or a recurrent mixer, reads.
    """

    attention_input: float = 1.0
    key: float = 1.0
    attention_output: float = 1.0
    recurrent_input: float = 1.0
    recurrent_gate: float = 1.0
    recurrent_value: float = 1.0
    recurrent_key: float = 1.0
    recurrent_query: float = 1.0
    decay: float = 1.0
    recurrent_output: float = 1.0
    gate: float = 1.0
    down: float = 1.0


@dataclasses.dataclass(frozen=True)
class IndexSizes:
    """Sizes of the index of sparse attention: see `jlade.models.layers.index`.

    Attributes:
      heads: of its queries.
      size: elements of a head's query, and of the key.
      chosen: tokens that a token sees.
      interleaved: whether neighbours are the pairs that are rotated, not halves.
      shared_layers: layers that have no index, and see what the layer before them sees (GLM 5.2).
    """

    heads: int
    size: int
    chosen: int
    interleaved: bool = False
    shared_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention: see `jlade.models.layers.latent_attention`.

    Attributes:
      query_rank: elements of the latent of queries, None for queries that are products of the hidden state.
      rank: elements of the latent of keys and values.
      rotated: elements of queries that are rotated, and of the rotated key, which all heads share.
      unrotated: elements of queries and keys that are not.
      value_size: elements of a value.
      index: of the tokens that are seen, None where all are.
    """

    query_rank: int | None
    rank: int
    rotated: int
    unrotated: int
    value_size: int
    index: IndexSizes | None = None

    @property
    def query_size(self) -> int:
        """Elements of a head's query."""
        return self.unrotated + self.rotated

    @property
    def key_size(self) -> int:
        """Elements of the key that all heads share, its latent included."""
        return self.rank + self.rotated

    @property
    def cached_size(self) -> int:
        """Elements that the cache has of a token: the key, then that of the index."""
        return self.key_size + (0 if self.index is None else self.index.size)

    def splits(self, has_index: bool) -> tuple[int, ...]:
        """Returns where these elements divide into parts, which have nothing in common; `has_index` is of a layer."""
        return (self.rank, self.key_size) if has_index else (self.rank,)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a LLaMA model or a relative.

    The defaults of the variations are those of LLaMA. `jlade.conversion.families` has the values of each family.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP that all tokens pass; 0 for none, where there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6  # of every norm
    rope_theta: float = 10000.0
    rope_scaling: rotary.Scaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2
    qkv_bound: float | None = None  # of the elements of queries, keys and values, with either sign (OLMo)
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3
    # Mistral, Qwen2: number of tokens that a token of each layer sees, itself included, None for all; () for no windows
    sliding_windows: tuple[int | None, ...] = ()
    eos_ids: tuple[int, ...] = ()  # tokens that end a text
    media_ids: tuple[int, ...] = ()  # tokens that stand for images, videos and sounds, which no text has
    stop_strings: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # that end a text; they cost no time
    model_type: str | None = None  # of transformers; None for LLaMA, Mistral, Qwen2 and Qwen3: see `family`

    # Elements of a value, where the cache pads them to those of a key; None for as many (MiMo V2)
    value_size: int | None = None
    query_heads: tuple[int, ...] = ()  # of each layer; () where all have `num_heads` (Laguna)
    # Where layers differ, those of the layers without a window, whose queries have their size too (Gemma 4)
    global_heads: Heads | None = None
    values_from_keys: bool = False  # in layers without a window, the product that makes the keys is that of the values
    # The last layers, which read keys and values of the last one before them that also has a window, or none (Gemma 4)
    shared_kv_layers: int = 0
    wide_mlp: bool = False  # whether MLPs of these layers have twice the inner size
    per_layer_size: int = 0  # of embeddings for each layer, 0 for none; see `jlade.models.layers.PerLayer`
    per_layer_vocab_size: int = 0

    # One of `NORMS`; the weights of "rms_plus_one" are added to 1 (Gemma), and "rms_late" rounds after them (Gemma 4)
    norm: str = "rms"
    norm_bias: bool = False  # of the norms of hidden states (StarCoder2)
    pre_norms: bool = True  # of the inputs of attention and MLP
    post_norms: bool = False  # of their outputs (OLMo 2), or of both (Gemma 2)
    expert_post_norm: bool = False  # of the outputs of layers with experts alone (A.X K1)
    qk_norm_kind: str = "head"  # with `qk_norm`, one of `QK_NORMS`
    value_norm: bool = False  # of each head's values, without weights (Gemma 4)
    layer_scale: bool = False  # whether a number scales the hidden states after each layer (Gemma 4)
    activation: str = "silu"  # one of `ACTIVATIONS`
    # Whether the activation of one product multiplies another, in experts too (all but StarCoder2, Phi-2, Nemotron H)
    gated_mlp: bool = True
    num_experts: int = 0  # of each layer, 0 for none (Mixtral)
    expert_size: int = 0  # inner size of an expert
    expert_latent: int = 0  # elements of an expert's input and output, 0 for hidden states (Nemotron 3 Super)
    experts_per_token: int = 0
    normalized_experts: bool = True  # whether the weights of a token's experts add up to one
    expert_epsilon: float = 1e-20  # added to the sum of scores by which they are normalized (1e-6 in LFM2)
    router_bias: bool = False  # GPT-OSS
    routing: str = "softmax"  # one of `ROUTINGS` (Phi-MoE, Llama 4)
    selection_bias: bool = False  # of the scores by which experts are chosen, not of their weights (DeepSeek V3)
    expert_groups: int = 1  # a token chooses from some groups of the experts (DeepSeek V3)
    groups_per_token: int = 1
    group_leaders: int = 2  # best experts of a group whose scores together are the group's (1 in DeepSeek V2)
    expert_scale: float = 1.0  # of the weights of a token's experts (DeepSeek V3)
    least_divisor: float = 0.0  # of these weights where they are normalized (ERNIE 4.5)
    float32_router: bool = False  # whether routers are in float32 in a model of any dtype (ERNIE 4.5, Hy3)
    dense_layers: tuple[int, ...] = ()  # those that have no experts, where others have (DeepSeek V3)
    dense_size: int = 0  # inner size of their MLP
    averages_mixture: bool = False  # whether experts and the MLP beside them are averaged, not added (Cohere)
    # Whether MLP and experts both read the hidden states, with norms of their own, and so does the router (Gemma 4)
    separate_experts: bool = False
    shared_router: bool = False  # whether a router weighs the MLP that all tokens pass (Qwen2-MoE)
    output_bias: bool = False  # of the logits (Phi-2, Phi-MoE)
    parallel: bool = False  # whether attention and MLP read the same norm and are added together (Cohere)
    parallel_norm: bool = False  # whether the MLP has a norm of its own then (GPT-NeoX)

    # Layers that are an MLP or experts alone, where the others are a mixer alone; None where each is both (Nemotron H)
    mlp_layers: tuple[int, ...] | None = None
    recurrent_layers: tuple[int, ...] = ()  # those that have a state in the place of keys and values (Qwen3-Next)
    recurrence: Recurrence | None = None  # of these
    recurrent_pre_norms: bool = False  # whether these have norms before alone, whatever others have (OLMo Hybrid)
    recurrent_attention: bool = False  # whether these have attention too, which reads the same norm (Falcon-H1)
    output_gate: bool = False  # whether a product, after an activation, weighs the output of attention (Qwen3-Next)
    gate_activation: str = "sigmoid"  # one of `GATES`, of that product
    head_gates: bool = False  # whether it is one number for each head (Ling 3, LFM3)

    # The rotation of each layer where layers differ, None for no rotation; () for `rope_theta` and `rope_scaling`
    layer_rotary: tuple[rotary.Rotary | None, ...] = ()
    learned_positions: bool = False  # whether an array of embeddings has one for each position (GPT-2)
    rotary_dim: int | None = None  # leading elements of a head that are rotated, None for all (StableLM)
    latent: Latent | None = None  # with one KV head, of `Latent.cached_size` elements (DeepSeek V2)
    interleaved_rotary: bool = False  # whether neighbours are pairs, not halves of a head (Cohere)
    # Of each layer, None for none; () for no layer (Ministral 3, Llama 4)
    query_scalings: tuple[rotary.QueryScaling | None, ...] = ()
    # Of the scores, None for the inverse root of `head_dim`, of a query's size before it meets latents (Granite)
    attention_scale: float | None = None
    sinks: bool = False  # whether each head has a score that joins the softmax for no token (GPT-OSS)
    window_sinks: bool = False  # whether heads of layers with windows alone have it (MiMo V2)
    attention_cap: float | None = None  # bounds the scores by a tanh (Gemma 2)
    logit_cap: float | None = None  # bounds the logits by a tanh (Gemma 2)
    embedding_scale: float = 1.0  # Gemma, Granite
    residual_scale: float = 1.0  # of what attention and MLP add to the hidden states (Granite)
    logit_scale: float = 1.0  # Cohere, Granite
    multipliers: Multipliers = Multipliers()

    def __post_init__(self) -> None:
        choices = {"norm": NORMS, "qk_norm_kind": QK_NORMS, "activation": ACTIVATIONS, "routing": ROUTINGS}
        choices["gate_activation"] = GATES
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        if self.routing not in SCORED and (self.selection_bias or self.expert_groups > 1 or self.expert_scale != 1):
            raise ValueError(
                f"selection_bias, expert_groups and expert_scale need one of the routings {', '.join(SCORED)}, got "
                f"{self.routing!r}"
            )
        if self.latent and (self.num_kv_heads, self.head_dim) != (1, self.latent.cached_size):
            raise ValueError(
                f"latent attention has num_kv_heads=1 and head_dim={self.latent.cached_size}, got {self.num_kv_heads} "
                f"and {self.head_dim}"
            )

    @property
    def family(self) -> str:
        """The `model_type` of transformers for these settings."""
        if self.model_type is not None:
            return self.model_type
        if self.qk_norm:
            return "qwen3"
        if self.qkv_bias and not self.attention_output_bias:
            return "qwen2"
        return "mistral" if any(self.sliding_windows) else "llama"

    @property
    def rotary_by_layer(self) -> tuple[rotary.Rotary | None, ...]:
        """The rotation of each layer, None for no rotation."""
        return self.layer_rotary or (rotary.Rotary(self.rope_theta, self.rope_scaling),) * self.num_layers

    @property
    def windows_by_layer(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None for no window."""
        return self.sliding_windows or (None,) * self.num_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        others = {*(() if self.recurrent_attention else self.recurrent_layers), *(self.mlp_layers or ())}
        return tuple(i for i in range(self.num_layers) if i not in others)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        return tuple(i for i in self.attention_layers if i < self.num_layers - self.shared_kv_layers)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it reads, which may be itself."""
        num_own, windows = self.num_layers - self.shared_kv_layers, self.windows_by_layer
        last = {window is None: i for i, window in enumerate(windows[:num_own])}
        return (*range(num_own), *(last[window is None] for window in windows[num_own:]))

    def has_sinks(self, layer: int) -> bool:
        """Whether each head of a layer has a score that joins the softmax for no token."""
        return self.sinks and not (self.window_sinks and self.windows_by_layer[layer] is None)

    def has_index(self, layer: int) -> bool:
        """Whether a layer has an index of the tokens that are seen."""
        index = None if self.latent is None else self.latent.index
        return index is not None and layer not in index.shared_layers

    def num_heads_of(self, layer: int) -> int:
        """Returns the number of heads for queries of a layer."""
        return self.query_heads[layer] if self.query_heads else self.num_heads

    def heads_of(self, layer: int) -> Heads:
        """Returns the heads for keys and values of a layer, with the elements that the cache has of each."""
        if self.latent is not None:
            return Heads(1, self.latent.cached_size if self.has_index(layer) else self.latent.key_size)
        if self.global_heads is None or self.windows_by_layer[layer] is not None:
            return Heads(self.num_kv_heads, self.head_dim)
        return self.global_heads

    @property
    def heads_by_layer(self) -> tuple[Heads, ...]:
        """The heads for keys and values of each layer."""
        return tuple(map(self.heads_of, range(self.num_layers)))

    @property
    def rotated_by_layer(self) -> tuple[tuple[rotary.Rotary, int] | None, ...]:
        """The rotation of each layer and the elements of a head that it turns, None for no rotation."""
        pairs = zip(self.rotary_by_layer, self.heads_by_layer, strict=True)
        return tuple(
            None if kind is None else (kind, kind.dim or self.rotary_dim or heads.size) for kind, heads in pairs
        )

    def entries_by_layer(self, capacity: int) -> tuple[int, ...]:
        """Returns the cache entries of each layer, 0 without attention, for a text of up to `capacity` tokens."""
        attend = set(self.attention_layers)
        entries = (num_entries(window, capacity) for window in self.windows_by_layer)
        return tuple(number if i in attend else 0 for i, number in enumerate(entries))

    @property
    def arrays_per_layer(self) -> int:
        """Arrays that a layer has in the cache: keys and values, or keys that are the values too."""
        return 2 if self.latent is None else 1

    def scales_of(self, layer: int) -> int:
        """Returns the number of scales that a vector in 8 bits has in the cache of a layer: one for each part."""
        return 1 if self.latent is None else 1 + len(self.latent.splits(self.has_index(layer)))

    @property
    def query_scalings_by_layer(self) -> tuple[rotary.QueryScaling | None, ...]:
        """The scaling of each layer's queries by position, None for none."""
        return self.query_scalings or (None,) * self.num_layers

    @property
    def score_scale(self) -> float | None:
        """Of the products of queries and keys, None for the inverse root of `head_dim`."""
        if self.attention_scale is None and self.latent is not None:
            return self.latent.query_size**-0.5
        return self.attention_scale

    @property
    def expert_width(self) -> int:
        """The elements of an expert's input and output."""
        return self.expert_latent or self.hidden_size

    @property
    def num_parts(self) -> int:
        """The number of mixers, and of MLPs and mixtures of experts: two for each layer, or one (Nemotron H)."""
        return self.num_layers * (2 if self.mlp_layers is None else 1)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 0 and self.has_mlp(layer) and layer not in self.dense_layers

    def mlp_size(self, layer: int) -> int:
        """Returns the inner size of the MLP that all tokens pass in a layer, 0 for none."""
        if not self.has_mlp(layer):
            return 0
        is_wide = self.wide_mlp and layer >= self.num_layers - self.shared_kv_layers
        return self.dense_size if layer in self.dense_layers else self.intermediate_size * (2 if is_wide else 1)

    @property
    def mlp_widths(self) -> str:
        """The inner sizes of the MLPs, for people."""
        experts = f"{self.num_experts} experts of {self.expert_size:,}" if self.num_experts else ""
        wide = 2 * self.intermediate_size if self.wide_mlp else 0
        sizes = [f"{size:,}" for size in (self.dense_size, self.intermediate_size, wide) if size]
        return " and ".join(filter(None, [*sizes, experts]))

    def share_of_experts(self, tokens: float) -> float:
        """Returns the share of a layer's experts that some of `tokens` choose, in expectation, if all are as likely."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** tokens if self.num_experts else 1.0

    @property
    def attention_variations(self) -> dict[Heads, tuple[Variation, ...]]:
        """The different variations of attention of the layers with the same heads."""
        has_cap, by_heads = self.attention_cap is not None, dict[Heads, dict[Variation, None]]()
        has_choice = self.latent is not None and self.latent.index is not None
        for layer, (heads, window) in enumerate(zip(self.heads_by_layer, self.windows_by_layer, strict=True)):
            variation = Variation(window is not None, has_cap, self.has_sinks(layer), has_choice)
            by_heads.setdefault(heads, {})[variation] = None
        return {heads: tuple(variations) for heads, variations in by_heads.items()}
