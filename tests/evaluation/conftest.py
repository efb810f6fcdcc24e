import pytest

from tests.evaluation import browser


@pytest.fixture(scope="module")
def open_page():
    """Returns `browser.open_page` for a browser that the tests of a module share."""
    with browser.launched() as launched:
        yield lambda path, width, **context: browser.open_page(launched, path, width, **context)
