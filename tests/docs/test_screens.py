"""What commands print is what is recorded; see screens/screens.py."""

import pytest

from tests.docs.screens import screens

CASES = [(name, width) for name in screens.SCREENS for width in screens.WIDTHS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width"), CASES)
def test_a_screen_is_what_is_recorded(name, width):
    recorded = screens.path_of(name, width).read_text()
    assert screens.show(name, width) == recorded
    assert max(map(len, recorded.splitlines())) <= width or name == "readme"


def test_all_screens_are_recorded():
    files = {path.name for path in screens.DIRECTORY.glob("*.txt")}
    assert files == {screens.path_of(*case).name for case in CASES}


def test_numbers_are_not_compared():
    line = "  steps   1,234 - 0.5e-3 ms ━━━━ 12:34"
    assert screens.normalize(line) == " steps 0 ms ─ 0"
    assert screens.normalize("keras 0.2.0.dev0") == "keras 0"
