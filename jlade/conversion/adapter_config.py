"""adapter_config.json of LoRA adapters in PEFT's format: which modules an adapter changes, and by what."""

import dataclasses
import os
import pathlib
import re
from itertools import accumulate
from typing import Any

from jlade.conversion.json_files import Values, read_json, refuse_or_warn, shown

NAME = "adapter_config.json"
# Keys with which PEFT gets other weights than the sum below, and the values with which it does not.
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base model
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "megatron_config": (None, {}),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "velora_config": (None,),
}
READ = {
    "alpha_pattern",
    "ensure_weight_tying",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "modules_to_save",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
}
WITHOUT_EFFECT = {  # on the merged weights, given the tensors
    "auto_mapping",
    "base_model_name_or_path",
    "bias",  # the file has those that were trained
    "corda_config",
    "eva_config",
    "fan_in_fan_out",  # PEFT corrects it for the layers of these models
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The keys of adapter_config.json. Modules have their names in transformers, such as model.layers.0.mlp.up_proj."""

    values: Values

    def rank(self, module: str) -> int:
        """Returns the number of rows of `lora_A`, which is that of the columns of `lora_B`."""
        return self._of("rank_pattern", module, "r").size("r")

    def scale(self, module: str) -> float:
        """Returns the factor of the product of both."""
        rank, alpha = self.rank(module), self._of("alpha_pattern", module, "lora_alpha").number("lora_alpha")
        return alpha / (rank**0.5 if self.values.boolean("use_rslora") else rank)

    def targets(self, module: str) -> bool:
        """Whether a module has factors; as `peft.tuners.tuners_utils.check_target_module_exists`."""
        excluded, targeted = self._names("exclude_modules"), self._names("target_modules")
        if self._is_named("exclude_modules", excluded, module):
            return False
        if any(self._match("modules_to_save", rf"(.*\.)?{name}(\..*)?$", module) for name in self.saved):
            return False
        if self.is_all_linear:
            return not module.endswith(("embed_tokens", "lm_head", "embed_in", "embed_out"))
        if isinstance(targeted, str) or module in targeted:
            return self._is_named("target_modules", targeted, module)
        return self._is_named("target_modules", targeted, module) and self._is_of_layers(module)

    @property
    def is_all_linear(self) -> bool:
        """Whether the modules are those of a kind, in the place of which PEFT writes their names."""
        return str(self.values.get("target_modules")).lower() == "all-linear"

    @property
    def saved(self) -> list[str]:
        """The ends of the names of modules that are saved whole."""
        names = self._names("modules_to_save")
        return [names] if isinstance(names, str) else names

    def saves(self, module: str) -> bool:
        """Whether a module, or one that it is in, is saved whole."""
        return any(outer.endswith(tuple(self.saved)) for outer in accumulate(module.split("."), "{}.{}".format))

    @property
    def keeps_ties(self) -> bool:
        """Whether a saved embedding is the output matrix too, in a model that ties them."""
        return self.values.boolean("ensure_weight_tying")

    def _of(self, key: str, module: str, default: str) -> Values:
        """Returns values of which `default` is that of the first pattern in `key` that fits a module, if any does."""
        patterns = self.values.get(key, {})
        if not isinstance(patterns, dict):
            raise ValueError(f"{self.values.file}: {key} must be an object, got {shown(patterns)}")
        fitting = [value for name, value in patterns.items() if self._match(key, rf"(.*\.)?({name})$", module)]
        return dataclasses.replace(self.values, values={default: fitting[0]}) if fitting else self.values

    def _names(self, key: str) -> str | list[str]:
        """Returns a list of names, empty for null, or a regular expression."""
        names = self.values.get(key, [])
        if not (isinstance(names, str) or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
            raise ValueError(f"{self.values.file}: {key} must be a list of names, got {shown(names)}")
        return names

    def _is_named(self, key: str, names: str | list[str], module: str) -> bool:
        """Whether a regular expression fits the whole name of a module, or one of several names its end."""
        if isinstance(names, str):
            return self._match(key, rf"(?:{names})$", module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _is_of_layers(self, module: str) -> bool:
        """Whether a module is in one of the layers of `layers_to_transform`, if there are any."""
        layers = self.values.get("layers_to_transform", [])
        layers = [layers] if isinstance(layers, int) else layers
        patterns = self._names("layers_pattern") or [r"[^.]*"]
        numbers = [
            self._match("layers_pattern", rf"(?:.*?\.)?{pattern}\.(?P<number>\d+)\.", module)
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
        ]
        return not layers or any(match is not None and int(match["number"]) in layers for match in numbers)

    def _match(self, key: str, pattern: str, module: str) -> re.Match[str] | None:
        try:
            return re.match(pattern, module)
        except re.error as error:
            raise ValueError(
                f"{self.values.file}: {key} has a broken regular expression, {pattern}: {error}"
            ) from error


def read(directory: pathlib.Path, strict: bool) -> AdapterConfig:
    """Returns the content of adapter_config.json."""
    file = directory / NAME
    raw = read_json(file)
    for key, values in ONLY_VALUES.items():
        if raw.get(key) not in values:
            raise ValueError(
                f"{file}: {key} is {shown(raw.get(key))}; supported is {' or '.join(map(repr, values))}. Where PEFT "
                'can merge such an adapter, this writes the merged model: python -c "from peft import '
                f"AutoPeftModelForCausalLM as M; M.from_pretrained('{directory}').merge_and_unload()"
                ".save_pretrained('NEW_DIR')\""
            )
    if not raw.get("target_modules"):
        raise ValueError(
            f"{file}: target_modules must be names or a regular expression, got {raw.get('target_modules')}"
        )
    if unknown := ", ".join(sorted(raw.keys() - ONLY_VALUES.keys() - READ - WITHOUT_EFFECT)):
        warning = f"{file}: ignored unknown keys, which strict=True refuses: {unknown}"
        refuse_or_warn(strict, file, f"unknown keys: {unknown}", warning)
    return AdapterConfig(Values(file, raw))


def say_ignored(directory: pathlib.Path, strict: bool) -> None:
    """Warns of an adapter beside a model, which transformers loads where PEFT is installed, or if `strict` refuses."""
    if not (directory / NAME).exists():
        return
    message = f"the adapter of {directory / NAME}; adapter={os.fspath(directory)!r} merges it"
    warning = f"{directory}: ignored, which strict=True refuses, is {message}"
    refuse_or_warn(strict, directory, f"to ignore {message}", warning)


def refuse_as_model(directory: pathlib.Path) -> None:
    """Raises a ValueError that names the base model, if a directory has an adapter and no model."""
    if (directory / NAME).exists() and not (directory / "config.json").exists():
        base = read_json(directory / NAME).get("base_model_name_or_path")
        raise ValueError(
            f"{directory} has no model but an adapter of {base!r}: load it with jlade.load({base!r}, "
            f"adapter={os.fspath(directory)!r}), or in the commands with --model {base} --adapter {directory}"
        )
