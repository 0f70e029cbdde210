"""Makes crates/media/tests/data: pictures of the kinds that users pass in, written by Pillow.

Run from the repository root: python tests/reference/pictures.py
Where decoding is not plain arithmetic, `NAME.expected.png` holds what Pillow reads back. `versions.json` says what made
them.
"""

import json
import pathlib
import platform
import struct
import zlib

import numpy as np
import PIL
from PIL import Image, ImageOps, PngImagePlugin

OUT = pathlib.Path("crates/media/tests/data")
W, H = 17, 33


def rgb():
    """Red grows to the right, green downwards, blue falls along the diagonal."""
    y, x = np.mgrid[0:H, 0:W]
    return np.stack([x * 15, y * 7, 255 - 5 * (x + y)], axis=-1).astype(np.uint8)


def alpha():
    y, x = np.mgrid[0:H, 0:W]
    return ((x * 16 + y * 11) % 256).astype(np.uint8)


def grey():
    return rgb()[..., 1]


def save(name, image, **options):
    image.save(OUT / name, **options)


def expect(name):
    image = ImageOps.exif_transpose(Image.open(OUT / name)).convert("RGB")
    image.save(OUT / f"{name.rsplit('.', 1)[0]}.expected.png", optimize=True)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def rgb16(name):
    """Pillow has no 16-bit RGB. The low bytes go up and down around the value, so that rounding is seen."""
    high = rgb().astype(np.uint16)
    wide = np.clip(high.astype(np.int64) * 257 + np.where(np.indices(high.shape).sum(0) % 2 == 0, 100, -100), 0, 65535)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in wide)
    header = struct.pack(">IIBBBBB", W, H, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    (OUT / name).write_bytes(data)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    colour = Image.fromarray(rgb())
    with_alpha = Image.fromarray(np.dstack([rgb(), alpha()]))

    save("rgb.png", colour)
    save("rgba.png", with_alpha)
    save("grey.png", Image.fromarray(grey()))
    save("grey_alpha.png", Image.fromarray(np.dstack([grey(), alpha()])))
    rgb16("rgb16.png")
    save("bilevel.png", Image.fromarray(grey() > 100))

    palette = colour.quantize(16)
    save("palette.png", palette)
    expect("palette.png")

    # 6: the rows of the file are the columns of the picture, from the right.
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = colour.resize((W * 2, H * 2))
    save("orientation6.jpg", turned, quality=90, exif=exif)
    expect("orientation6.jpg")
    save("orientation6.png", colour, exif=exif)

    save("progressive.jpg", turned, quality=90, progressive=True)
    expect("progressive.jpg")
    save("cmyk.jpg", turned.convert("CMYK"), quality=90)
    expect("cmyk.jpg")
    save("grey.jpg", Image.fromarray(grey()).resize((W * 2, H * 2)), quality=90)
    expect("grey.jpg")

    save("lossy.webp", turned, quality=90)
    expect("lossy.webp")
    save("rgba.webp", with_alpha, lossless=True, exact=True)
    frames = [colour, ImageOps.invert(colour), ImageOps.mirror(colour)]
    save("animated.webp", frames[0], save_all=True, append_images=frames[1:], lossless=True, duration=40)

    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", "caf\u00e9")
    texts.add_text("Packed", "z" * 300, zip=True)
    texts.add_itxt("parameters", "\u732b\u3068\U0001f408\nSeed: 1", lang="ja")
    texts.add_itxt("Packed UTF-8", "\u732b" * 300, zip=True)
    save("texts.png", colour, pnginfo=texts)

    versions = {"python": platform.python_version(), "pillow": PIL.__version__, "numpy": np.__version__}
    (OUT / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
