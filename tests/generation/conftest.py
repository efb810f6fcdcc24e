import pytest

import jlade


@pytest.fixture(scope="session")
def demo(small_demo):
    """Parameters and tokenizer of the demo model's first layer, in float32."""
    return jlade.load(small_demo, "float32")
