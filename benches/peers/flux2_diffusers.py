"""diffusers' FLUX.2 klein in bf16 with random weights of the published shapes: ms (medians) and peak memory.

step CONFIG SIZE..            the transformer alone; SIZE is HxW, or HxW+HxW with a reference picture
vae CONFIG SIZE               latents on the device to bytes on the host
text CONFIG ROWS REAL         all hidden states of Qwen3 for REAL tokens padded to ROWS
picture CONFIG CONFIG CONFIG SIZE STEPS   the pipeline (transformer, vae, text encoder): a prompt to the bytes of a PNG file

Configs are JSON texts. `--compile` compiles the transformer and the VAE's decoder; of `text`, the text encoder. Without a GPU
the CPU serves, to try the script."""

import argparse
import io
import json
import pathlib
import re
import statistics
import time

import diffusers
import torch
import transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("task", choices=["step", "vae", "text", "picture"])
parser.add_argument("arguments", nargs="+")
parser.add_argument("--runs", type=int, default=15)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--text", type=int, default=512, help="rows of text of a step and of a picture")
parser.add_argument("--out-layers", default="9,18,27", help="hidden states that a picture's text encoder gives")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(0)


def wait():
    if cuda:
        torch.cuda.synchronize()


def median(call, runs):
    call()
    call()
    times = []
    for _ in range(runs):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def build(make):
    """A model with random weights, made on the device in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = make()
    finally:
        torch.set_default_dtype(before)
    return model.to(device, torch.bfloat16).eval().requires_grad_(False)


def transformer_of(config):
    return build(lambda: diffusers.Flux2Transformer2DModel.from_config(json.loads(config)))


def vae_of(config):
    return build(lambda: diffusers.AutoencoderKLFlux2.from_config(json.loads(config)))


def text_encoder_of(config):
    config = transformers.Qwen3Config(**json.loads(config))
    return build(lambda: transformers.Qwen3ForCausalLM(config))


def size_of(text):
    return tuple(int(side) for side in re.fullmatch(r"(\d+)x(\d+)", text).groups())


def grid_ids(height, width, t):
    return torch.cartesian_prod(torch.tensor([t]), torch.arange(height), torch.arange(width), torch.arange(1))


def step():
    config, *sizes = args.arguments
    model = transformer_of(config)
    if args.compile:
        model.forward = torch.compile(model.forward, dynamic=False)
    report = {}
    for size in sizes:
        pictures = [tuple(side // 16 for side in size_of(part)) for part in size.split("+")]
        ids = torch.cat([grid_ids(h, w, 10 * i) for i, (h, w) in enumerate(pictures)])
        arguments = dict(
            hidden_states=torch.randn(1, len(ids), model.config.in_channels, device=device, dtype=torch.bfloat16),
            encoder_hidden_states=torch.randn(1, args.text, model.config.joint_attention_dim, device=device, dtype=torch.bfloat16),
            timestep=torch.full((1,), 0.9, device=device, dtype=torch.bfloat16),
            img_ids=ids[None].to(device),
            txt_ids=torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(args.text))[None].to(device),
            guidance=None,
            return_dict=False,
        )
        report[size] = median(lambda: model(**arguments), args.runs)
    return report


def vae():
    config, size = args.arguments
    height, width = size_of(size)
    model = vae_of(config)
    if args.compile:
        model = model.to(memory_format=torch.channels_last)
        model.decoder.forward = torch.compile(model.decoder.forward, dynamic=False)
    latents = torch.randn(1, model.config.latent_channels, height // 8, width // 8, device=device, dtype=torch.bfloat16)

    def decode():
        picture = model.decode(latents, return_dict=False)[0]
        return ((picture / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()

    return {"vae": median(decode, args.runs)}


def text():
    config, rows, real = args.arguments[0], int(args.arguments[1]), int(args.arguments[2])
    model = text_encoder_of(config)
    if args.compile:
        model.forward = torch.compile(model.forward, dynamic=False)
    ids = torch.randint(0, model.config.vocab_size, (1, rows), device=device)
    mask = (torch.arange(rows, device=device) < real).long()[None]
    return {"text": median(lambda: model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False), args.runs)}


def picture():
    transformer_config, vae_config, text_config, size, steps = args.arguments
    height, width = size_of(size)
    folder = pathlib.Path(__file__).resolve().parents[2] / "tests" / "models" / "flux2-demo" / "tokenizer"
    # Not through its config, which names a class that older versions do not know.
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
    pipeline = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256, base_shift=0.5, max_image_seq_len=4096, max_shift=1.15, shift=3.0, use_dynamic_shifting=True
        ),
        vae=vae_of(vae_config),
        text_encoder=text_encoder_of(text_config),
        tokenizer=tokenizer,
        transformer=transformer_of(transformer_config),
        is_distilled=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    if args.compile:
        pipeline.transformer.forward = torch.compile(pipeline.transformer.forward, dynamic=False)
        pipeline.vae.decoder.forward = torch.compile(pipeline.vae.decoder.forward, dynamic=False)
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def make():
        image = pipeline(
            prompt="a large red circle to the left of a small blue star above a green heart on a white background "
            "with yellow rings and a pink triangle below",
            height=height,
            width=width,
            num_inference_steps=int(steps),
            guidance_scale=1.0,
            max_sequence_length=args.text,
            text_encoder_out_layers=tuple(int(layer) for layer in args.out_layers.split(",")),
            generator=torch.Generator("cpu").manual_seed(1),
        ).images[0]
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    return {"picture": median(make, max(args.runs // 2, 1))}


with torch.inference_mode():
    report = {"step": step, "vae": vae, "text": text, "picture": picture}[args.task]()
if cuda:
    report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
how = "compiled" if args.compile else "eager"
version = torch.__version__.split("+")[0]
print(json.dumps({"peer": f"diffusers {diffusers.__version__} torch {version} {how}"} | report))
