"""The pictures of the documents: which there are, and the animated one."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest

from scripts import pictures
from scripts.apng import Frame, Pixels, encode
from tests.support.pages import running_browser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
MAX_BYTES = 1_000_000  # of one picture; a page loads all of its own


def test_every_picture_of_the_page_is_shown_and_made_by_the_script() -> None:
    files = {path.stem for path in pictures.IMAGES.glob("*.png")}
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"images/([\w-]+)\.png", page.read_text("utf-8"))
    }
    assert files == shown
    assert {name for name in files if not name.startswith(tuple(pictures.PICTURES))} == set()


@pytest.mark.parametrize("path", sorted(pictures.IMAGES.iterdir()), ids=lambda path: path.name)
def test_no_picture_is_large(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES


def many_colours() -> Pixels:
    """240 colours in ten rows each, and 240 others, near to them, in one row."""
    reds, greens = np.mgrid[0:240:16, 0:256:16]
    row = np.stack([reds, greens, reds], axis=2).astype(np.uint8).reshape(1, 240, 3)
    return np.concatenate([*[row] * 10, row + np.uint8(1)])


DRAWN = """async (url) => {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  return [...canvas.getImageData(0, 0, image.width, image.height).data];
}"""


def test_a_browser_shows_the_frames_of_a_recording_one_after_the_other() -> None:
    red, blue = (np.full((8, 12, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    last = red.copy()
    last[2:5, 3:7] = (0, 0, 255)
    with running_browser() as browser:
        page = browser.new_page(viewport={"width": 60, "height": 40})

        def first(data: bytes) -> Pixels:
            drawn = page.evaluate(DRAWN, f"data:image/png;base64,{base64.b64encode(data).decode()}")
            return np.array(drawn, np.uint8).reshape(-1, 4)[:, :3]

        wrong = first(encode([Frame(many_colours(), 1)])) != many_colours().reshape(-1, 3)
        assert not wrong[:2400].any()
        assert wrong[2400:].any(axis=1).sum() == 240 - 16  # the palette has room for 16 of them
        file = encode([Frame(red, 0.01), Frame(blue, 0.01), Frame(blue, 0.01), Frame(last, 60)])
        assert (first(file) == (255, 0, 0)).all()
        source = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        page.set_content(f'<body style="margin: 0"><img src="{source}">')
        page.wait_for_timeout(500)
        shot = page.screenshot(clip={"x": 0, "y": 0, "width": 12, "height": 8})
        assert (first(shot) == last.reshape(-1, 3)).all()
