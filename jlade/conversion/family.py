"""A family of transformers' models: the keys of its config.json, the tensors of its files, and its architecture."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jlade.conversion.json_files import Values
from jlade.models.architecture import LlamaConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHARED = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
BIASES = {"attention_bias": False, "mlp_bias": False}  # of the families with one of these `keys`

# Keys that some versions of transformers write in the place of those that it documents for a family.
ALIASES = {"num_local_experts": "num_experts", "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
ALIASES |= {"global_attn_every_n_layers": "sliding_window_pattern"}
# Fields whose values are not those of their keys: see `hf_config`.
INVERSE, INVERSE_ROOT = {"logits_scaling"}, {"query_pre_attn_scalar"}
ROOT_OF_WIDTH = {"mup_enabled"}  # true for the root of hidden_size, false for 1
OPTIONAL = {"attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"}
EXPERTS: dict[str, tuple[str, ...]] = {
    "mlp.experts.{}.gate_proj.weight": ("mixture.gate",),
    "mlp.experts.{}.up_proj.weight": ("mixture.up",),
    "mlp.experts.{}.down_proj.weight": ("mixture.down",),
}
JOINED_EXPERTS: dict[str, tuple[str, ...]] = {
    "mlp.experts.gate_up_proj": ("mixture.gate", "mixture.up"),
    "mlp.experts.down_proj": ("mixture.down",),
}


def by_layer(key: str, default: Callable[[int], Any]) -> Callable[[Values], Any]:
    """Returns the function that reads a list of a value for each layer, by default `default` of the layer's number."""
    return lambda values: values.get(key, [default(i) for i in range(values.size("num_hidden_layers"))])


@dataclasses.dataclass(frozen=True)
class Family:
    """A `model_type` of transformers.

    Attributes:
      architecture: the class.
      defaults: of the keys that it reads, where they are not those of LLaMA.
      aliases: keys that the family has in the place of those that it reads here. Both are read and written.
      keys: the key of a field of `LlamaConfig` that is read as it is.
      fixed: values of fields of `LlamaConfig` for all models of the family, or functions from the keys to a value.
      derived: functions from the keys to values of `SIZES` and `SHARED` that follow from other keys.
      written: a function from a configuration to further keys that are written.
      only: keys, and the values of them that the family takes; the first is written. `(None,)` is for keys that are
        refused and never written.
      rotary: "all" for one rotation of all layers, "none" for no rotation (Nemotron H), "type" for one for each of the
        `layer_types`, "windows" for the layers with a window alone, "local" for these where `sliding_window` may not be
        null (AFMoE), "alpha" for one with HunYuan's kind of scaling, "mscale" for one with Phi-MoE's, "phi" for one
        with Phi-3's names of kinds, "beta" for one with a scaling of queries (Ministral 3), "sections" for one whose
        sections do nothing in text (Qwen3.5).
      tensors: names within a layer where they are not LLaMA's, by the path in `jlade.models.layers.Layer`; "norm" is
        the last norm.
      parallel_tensors: the same for models with `parallel_norm`, where their names differ.
      fused: the paths of the arrays whose rows a tensor in the file has, by the tensor's name within a layer.
      row_groups: for such tensors in which some rows of each field follow each other, by their names, the number of
        times: see `jlade.conversion.hf_tensors.Interleaved`.
      experts: the fields of experts that a tensor in the file has, by its name within a layer, where they are not
        Qwen's. A name with "{}" for an expert's number is the tensor [out, in] of that expert, and others are
        [N, out, in].
      joined_experts: the same in files that transformers writes with `save_original_format=False`; {} if these do not
        differ.
      renamed: other names within a layer in such files, with those of `tensors`.
      divided: for tensors in such files that have the rows of several of equal shape, the names of these.
      prefixes: beginnings of names in files, by those of jlade's names, where they are not `model.` and `lm_head.`.
      has_columns: whether matrices of layers are [in, out] in files.
      unread: ends of names of tensors in files that the model does not have, such as masks.
      implied: ends of names of tensors that files may leave out, with the value of all their elements.
      expert_layout: "rows" where the tensors of experts are [out, in], as above, "columns" where they are [N, in, out]
        (Llama 4), "interleaved" where these have the columns of gate and product in turn, or are in MXFP4 (GPT-OSS),
        "either" where joined tensors in files are "columns" if their shape says so, else "rows" (Qwen3-VL).
      elsewhere: keys that change the output, with the one value besides null and {} that does not: families that do not
        read them refuse all others.
      ignored: keys in `reads` that transformers ignores in config.json of this family: the default holds.
      without_effect: keys that change no output, of any family.
      other_names: of the `model_type`, in checkpoints with code of their own that is the family's.
      other_architectures: likewise of the class.
      of_parts: classes of the models with other parts whose text part is of this family, by their `model_type`.
      part_defaults: of the keys of such a part, where they are not those of the family.
      part_only: keys that such a part does not read, with the one value besides null that it implies.
    """

    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derived: Mapping[str, Callable[[Values], Any]] = dataclasses.field(default_factory=dict)
    written: Callable[[LlamaConfig], Mapping[str, Any]] = lambda config: {}
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    rotary: str = "all"
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parallel_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    row_groups: Mapping[str, Callable[[LlamaConfig], int]] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: EXPERTS)
    joined_experts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: JOINED_EXPERTS)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_columns: bool = False
    unread: tuple[str, ...] = ()
    implied: Mapping[str, float] = dataclasses.field(default_factory=dict)
    expert_layout: str = "rows"
    elsewhere: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    other_architectures: tuple[str, ...] = ()
    of_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    part_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    part_only: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def reads(self) -> dict[str, Any]:
        """The keys that the family reads, with the values of transformers for missing ones."""
        biases = {key: value for key, value in BIASES.items() if key in self.keys.values()}
        shared = dict(SHARED)
        if "norm_eps" in self.keys:  # the family has another name for it
            del shared["rms_norm_eps"]
        return shared | biases | dict(self.defaults)
