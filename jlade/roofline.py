"""W, N and G from what a device is: how many tokens it has idle arithmetic for while it reads the weights."""

from jlade.config import PLAIN, SMALL_BLOCK, LookaheadConfig

# Device -> (dense bfloat16 matrix rate in TFLOP/s, memory bandwidth in TB/s), of the first name that is part of JAX's
# `device_kind`. From NVIDIA's data sheets, for the RTX cards from its Ada whitepaper (rates with float32 sums), and
# from the pages of Google's Cloud TPU documentation on each version.
DEVICES = {
    "B200": (2250.0, 8.0),
    "H200": (989.0, 4.8),
    "H100 PCIe": (756.0, 2.0),
    "H100 NVL": (835.0, 3.9),
    "H100": (989.0, 3.35),
    "A100-SXM4-40GB": (312.0, 1.555),
    "A100-PCIE-40GB": (312.0, 1.555),
    "A100": (312.0, 2.039),
    "L40S": (362.0, 0.864),
    "L40": (181.0, 0.864),
    "L4": (121.0, 0.3),
    "RTX 4090": (165.2, 1.008),
    "RTX 3090": (71.0, 0.936),
    "TPU v4": (275.0, 1.228),
    "TPU v5 lite": (197.0, 0.819),  # v5e
    "TPU v5": (459.0, 2.765),  # v5p
    "TPU v6 lite": (918.0, 1.64),  # v6e
}
UNKNOWN = DEVICES["RTX 3090"]  # the least arithmetic for each byte of all of them

# The figures above are peaks, of which attention and everything between the products want a part. With this margin the
# 120 tokens that the paper found best for a 7B model on an A100 are just within.
MARGIN = 0.8

# Widest first: the settings of Table 4 of arXiv 2402.02057, and smaller ones.
SETTINGS = (
    LookaheadConfig(15, 5, 15),
    LookaheadConfig(10, 5, 10),
    LookaheadConfig(7, 5, 7),
    LookaheadConfig(5, 4, 5),
    SMALL_BLOCK,
)


def free_tokens(device_kind: str) -> float:
    """Returns T, the most tokens whose arithmetic takes no longer than reading the weights does.

    With P weights of b bytes, a matrix rate F and a bandwidth M, that is 2·P·T / F = MARGIN · P·b / M. P cancels out.
    b is 2 here: float32 is twice the bytes, and by default GPUs multiply it, as TF32, at half the rate.

    Args:
      device_kind: as JAX has it. A device that is not in `DEVICES` is taken for `UNKNOWN`.
    """
    rate, bandwidth = next((figures for name, figures in DEVICES.items() if name in device_kind), UNKNOWN)
    return MARGIN * rate / bandwidth


def estimate(platform: str, device_kind: str, batch_size: int = 1) -> LookaheadConfig:
    """Returns the widest of `SETTINGS` whose step takes about what plain decoding's does, or `config.PLAIN`.

    Args:
      platform: "cpu", "gpu", "tpu", ... CPUs have no idle arithmetic; for them it is the setting measured best.
      device_kind: as JAX has it.
      batch_size: B, texts at once. They read the weights together, so a step's tokens are those of B blocks.
    """
    if platform == "cpu":
        return SMALL_BLOCK
    room = free_tokens(device_kind) / batch_size
    return next((setting for setting in SETTINGS if setting.block_size <= room), PLAIN)
