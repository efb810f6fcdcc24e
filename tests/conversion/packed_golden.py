"""Makes the matrices of `tests/golden/packed.safetensors` with the packages of their formats: a program, not a test.

    python -m tests.conversion.packed_golden

It needs compressed-tensors, nvidia-modelopt and torchao beside transformers. A matrix has the tensors `FORMAT/NAME`
that the package writes, and `FORMAT/values`, those that it decodes in float32. The metadata has the quantization in
config.json for each format, and the versions of the packages.
"""

import importlib.metadata
import json
import pathlib
import tempfile

import torch
import transformers
from safetensors.torch import load_file, safe_open, save_file

from tests.conversion.packed_files import GOLDEN
from tests.stress.checkpoints import NAME

SHAPE = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELOPT = {  # by the name of a configuration there, what decodes its matrices, and the inputs of a group
    "FP8_DEFAULT_CFG": ("FP8QTensor", None),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("FP8QTensor", None),
    "MXFP8_DEFAULT_CFG": ("MXFP8QTensor", 32),
    "MXFP4_DEFAULT_CFG": ("MXFP4QTensor", 32),
    "NVFP4_DEFAULT_CFG": ("NVFP4QTensor", 16),
    "W4A16_NVFP4_CFG": ("NVFP4QTensor", 16),
    "W4A8_NVFP4_FP8_CFG": ("NVFP4QTensor", 32),
}


def main():
    tensors, metadata = {}, {}
    for package in ("compressed-tensors", "nvidia-modelopt", "torchao", "transformers"):
        metadata[package] = importlib.metadata.version(package)
    for make in (of_compressed_tensors, of_modelopt, of_torchao):
        for name, stored, values, config in make():
            stored = {key.removeprefix(f"{NAME}."): tensor for key, tensor in stored.items() if key.startswith(NAME)}
            tensors |= {f"{name}/{key}": tensor.clone() for key, tensor in (stored | {"values": values}).items()}
            metadata[name] = json.dumps(config)
    save_file(tensors, GOLDEN, metadata)


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def of_compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    weight = model().get_submodule(NAME).weight.detach()
    for form, bits in (("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)):
        settings = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
        scheme = QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**settings, scale_dtype=torch.uint8), format=form
        )
        largest = weight.float().reshape(len(weight), -1, 32).abs().amax(-1)
        scale = torch.exp2(torch.floor(torch.log2(largest / (6 if bits == 4 else 448)))).to(weight.dtype)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        values = compressor.decompress(stored, scheme)["weight"].float()
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
        named = {f"{NAME}.{key}": tensor.data for key, tensor in stored.items()}
        yield f"compressed-tensors, {form}", named, values, json.loads(config.model_dump_json())


def of_modelopt():
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization import qtensor

    for name, (kind, group) in MODELOPT.items():
        own = quantization.quantize(
            model(), getattr(quantization, name), lambda own: own(torch.arange(SHAPE["vocab_size"])[None])
        )
        with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
            export_hf_checkpoint(own, export_dir=temporary)
            stored = load_file(pathlib.Path(temporary) / "model.safetensors")
            config = json.loads((pathlib.Path(temporary) / "config.json").read_text())["quantization_config"]
        scale, whole = stored[f"{NAME}.weight_scale"], stored.get(f"{NAME}.weight_scale_2")
        shape = torch.Size((SHAPE["hidden_size"], SHAPE["intermediate_size"]))
        values = getattr(qtensor, kind)(shape, torch.float32, stored[f"{NAME}.weight"]).dequantize(
            torch.float32,
            scale=scale[:, None] if scale.ndim == 1 else scale,
            double_scale=whole,
            block_sizes={-1: group} if group else None,
        )
        yield f"ModelOpt, {config['quant_algo']}", stored, values, config


def of_torchao():
    import torchao.quantization as quantization
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    for config in (
        quantization.Int8WeightOnlyConfig(),
        quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32)),
        quantization.Int8DynamicActivationInt8WeightConfig(),
        quantization.Float8WeightOnlyConfig(),
    ):
        settings = transformers.TorchAoConfig(config)
        with tempfile.TemporaryDirectory() as temporary:
            model().save_pretrained(temporary)
            own = transformers.AutoModelForCausalLM.from_pretrained(
                temporary, dtype=torch.bfloat16, quantization_config=settings
            )
            own.save_pretrained(temporary)
            file = pathlib.Path(temporary) / "model.safetensors"
            stored = load_file(file)
            with safe_open(file, "pt") as opened:
                state, _ = unflatten_tensor_state_dict(stored, opened.metadata())
        granularity = type(getattr(config, "granularity", None)).__name__
        name = f"torchao, {type(config).__name__}, {granularity}"
        yield (
            name,
            stored,
            state[f"{NAME}.weight"].dequantize(torch.float32),
            json.loads(settings.to_json_string(False)),
        )


if __name__ == "__main__":
    main()
