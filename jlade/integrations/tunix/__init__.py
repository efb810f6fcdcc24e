"""tunix, reinforcement learning in JAX: its rollouts in fewer steps, and its models as decoders.

    ClusterConfig(rollout_engine=LookaheadRollout, ...)

`rollout` has the rollout engine and the sampler, `parameters` the architectures of its models, and `models` the
decoder of a model that stays as it is.
"""

try:
    import tunix.generate.sampler  # noqa: F401
except ImportError as error:
    raise ImportError(f"jlade.integrations.tunix needs tunix ({error}): pip install 'jlade[tunix]'") from error

from jlade.integrations.tunix.models import ModelDecoder as ModelDecoder
from jlade.integrations.tunix.models import decoder as decoder
from jlade.integrations.tunix.rollout import LookaheadRollout as LookaheadRollout
from jlade.integrations.tunix.rollout import LookaheadSampler as LookaheadSampler
