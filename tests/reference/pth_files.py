"""Makes crates/weights/tests/data/*.pth: small PyTorch checkpoints of the kinds that users have, and some that must be
refused.

Run from the repository root: python tests/reference/pth_files.py
The elements of every tensor count up from 0 in row-major order, so that a reader can tell when they come in another.
`versions.json` says what made the files.
"""

import argparse
import collections
import json
import os
import pathlib
import platform
import zipfile

import numpy as np
import torch

OUT = pathlib.Path("crates/weights/tests/data")


def ramp(*shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def flat():
    shared = ramp(4, 6)
    return collections.OrderedDict(
        {
            "f32": ramp(2, 3),
            "bf16": ramp(3, 2, dtype=torch.bfloat16),
            "f16": ramp(4, dtype=torch.float16),
            "f64": ramp(2, dtype=torch.float64),
            "i64": torch.tensor(7),
            "i32": ramp(3, dtype=torch.int32),
            "i16": ramp(3, dtype=torch.int16),
            "i8": ramp(3, dtype=torch.int8),
            "u8": ramp(3, dtype=torch.uint8),
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 5),
            "parameter": torch.nn.Parameter(ramp(2, 2)),
            # Row 1 to 2 of a larger tensor: contiguous, but not from its start.
            "rows": shared[1:3],
            # Elements 1 and 3 of each row, and the columns as rows: neither lies in one piece.
            "columns": shared[:, 1:5:2],
            "transposed": ramp(3, 2).T,
            "tied": shared,
        }
    )


class Command:
    """What a hostile checkpoint does: a call that runs while it is loaded."""

    def __reduce__(self):
        return os.system, ("true",)


def again(source, target, change, compression=zipfile.ZIP_STORED):
    """The same archive with other contents; `change` maps a member's name and bytes to new bytes."""
    with zipfile.ZipFile(OUT / source) as old, zipfile.ZipFile(OUT / target, "w", compression) as new:
        for member in old.infolist():
            data = change(member.filename, old.read(member))
            if data is not None:
                info = zipfile.ZipInfo(member.filename)
                info.compress_type = compression
                new.writestr(info, data)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    save = lambda value, name, **options: torch.save(value, OUT / name, **options)  # noqa: E731
    save(flat(), "flat.pth")
    save({"f32": ramp(2, 3), "bf16": ramp(3, 2, dtype=torch.bfloat16)}, "protocol5.pth", pickle_protocol=5)
    save({"f8": ramp(4).to(torch.float8_e4m3fn), "u16": torch.arange(3).to(torch.uint16)}, "narrow.pth")
    save({"epoch": 3, "lr": 1e-4, "tags": ["a", None, True], "state_dict": {"w": ramp(2, 3)}}, "state_dict.pth")
    save({"step": 2**40, "generator": {"model_state": {"w": ramp(2, 3)}}}, "nested.pth")
    save(torch.nn.Linear(2, 2).state_dict(), "metadata.pth")
    save(ramp(1, 2, 3), "lone.pth")
    lora = {f"lora_unet_blocks_0_proj.lora_{k}.weight": ramp(*s) for k, s in (("down", (4, 8)), ("up", (8, 4)))}
    save(lora, "lora.pth")

    save({"args": argparse.Namespace(lr=1), "state_dict": {"w": ramp(2)}}, "namespace.pth")
    save({"w": ramp(2), "run": Command()}, "command.pth")
    save(torch.nn.Linear(2, 2), "module.pth")
    save({"w": ramp(2), "loss": np.float64(1.5)}, "numpy.pth")
    save({"w": ramp(1, 2).expand(3, 2)}, "expanded.pth")
    save({"epoch": 3, "optimizer": {"lr": 0.1}}, "no_tensors.pth")
    save([ramp(2), ramp(3)], "list.pth")
    save({"w": torch.sparse_coo_tensor([[0]], [1.0], (2,))}, "sparse.pth")
    save({"w": torch.zeros(2, dtype=torch.complex128)}, "complex.pth")
    save({"w": ramp(2)}, "legacy.pth", _use_new_zipfile_serialization=False)
    again("state_dict.pth", "deflated.pth", lambda _, data: data, zipfile.ZIP_DEFLATED)
    again("state_dict.pth", "python_zip.pth", lambda _, data: data)
    again("state_dict.pth", "big_endian.pth", lambda name, data: b"big" if name.endswith("/byteorder") else data)
    again("state_dict.pth", "no_storage.pth", lambda name, data: None if name.endswith("/data/0") else data)
    again("state_dict.pth", "short_storage.pth", lambda name, data: data[:-4] if name.endswith("/data/0") else data)
    again("state_dict.pth", "no_pickle.pth", lambda name, data: None if name.endswith("data.pkl") else data)

    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    (OUT / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
