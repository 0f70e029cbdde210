"""Makes crates/sampling/tests/data/flow_match.json: sigmas and one Euler step as diffusers makes them.

Run from the repository root: python tests/reference/sampling.py
"""

import json
import pathlib
import platform

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

SIZES = [(64, 64), (256, 256), (512, 512), (768, 768), (1024, 1024), (1360, 768), (1040, 1056), (1792, 1792), (2048, 2048)]
STEPS = [1, 2, 4, 8, 20, 50]


def scheduler():
    # The published scheduler_config.json; `shift` has no effect under dynamic shifting.
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
        base_image_seq_len=256, max_image_seq_len=4096, time_shift_type="exponential",
    )


def schedules():
    for width, height in SIZES:
        seq = (width // 16) * (height // 16)
        for steps in STEPS:
            mu = compute_empirical_mu(image_seq_len=seq, num_steps=steps)
            s = scheduler()
            s.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
            yield {
                "width": width, "height": height, "image_seq_len": seq, "num_inference_steps": steps, "mu": mu,
                "sigmas": [float(x) for x in s.sigmas], "timesteps": [float(x) for x in s.timesteps],
            }


def euler(seq=64, steps=4, length=8):
    """Every step of a short run on latents that are not round numbers."""
    s = scheduler()
    s.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(seq, steps))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(length, generator=generator)
    rows = []
    for t in s.timesteps:
        velocity = torch.randn(length, generator=generator)
        after = s.step(velocity, t, latents, return_dict=False)[0]
        rows.append({"latents": latents.tolist(), "velocity": velocity.tolist(), "after": after.tolist()})
        latents = after
    return {"image_seq_len": seq, "num_inference_steps": steps, "steps": rows}


def main():
    versions = {
        "python": platform.python_version(), "diffusers": diffusers.__version__, "torch": torch.__version__,
        "numpy": np.__version__,
    }
    data = {"versions": versions, "schedules": list(schedules()), "euler": euler()}
    path = pathlib.Path("crates/sampling/tests/data/flow_match.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in data["schedules"])
    path.write_text(
        f'{{"versions": {json.dumps(versions)},\n"schedules": [\n{lines}\n],\n"euler": {json.dumps(data["euler"])}}}\n'
    )


if __name__ == "__main__":
    main()
