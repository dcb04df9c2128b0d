"""
Two published adapters side by side: what naive and smd made of SmolLM2-135M-Instruct.

    python -m experiments.adapters                    # the model comes from the hub
    python -m experiments.adapters --model=FOLDER --problems=32

Each was trained for 200 steps on the task `list`, by LoRA of rank 8, while the sampler kept 256 of
1,150 prompt keys (results/list-lora/). Here each is added to the model's weights and answers the
same held-out problems, once from the compressed and once from the dense cache.
"""
import os

import safetensors.torch
import torch

import train
from data.rewards import find_reward
from data.tokenizer import Tokenizer
from kvcache import Eviction
from model import Transformer, find_checkpoint
from run.evaluate import evaluate
from run.settings import eviction_of
from run.start import problems_of
from support.configurator import Arguments
from support.jsonfile import read_json
from support.run import choose_device
from support.screen import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "results", "list-lora", "adapters")
ARMS = ("naive", "smd")
PREFIX = "base_model.model.model."  # of peft's names, before those of model.py


@torch.no_grad()
def add(net, folder):
    """W + s B A for each matrix of the adapter in `folder`, whose files are peft's."""
    config = read_json(os.path.join(folder, "adapter_config.json"))
    scale = config["lora_alpha"] / config["r"]
    path = os.path.join(folder, "adapter_model.safetensors")
    saved = safetensors.torch.load_file(path)
    parts = net.parts()
    firsts = [name for name in saved if "lora_A" in name]  # each has its lora_B
    for name in firsts:
        weight, rows = parts[name.removeprefix(PREFIX).replace("lora_A.", "")]
        A = saved[name].to(weight.device, torch.float32)                     # (r, in)
        B = saved[name.replace("lora_A", "lora_B")].to(A)                    # (out, r)
        weight[rows] += (scale * B @ A).to(weight.dtype)


def compare(config, n):
    """Yield a line for each adapter, and the two answers to its first problem."""
    folder = find_checkpoint(config.model)
    tok = Tokenizer(folder)
    problems = problems_of(config, tok, rule=find_reward(config.reward), n_eval=n)
    caches = dict(compressed=eviction_of(config), dense=Eviction("none"))
    for arm in ARMS:
        net = Transformer.from_pretrained(folder, device=config.device)
        net.use_tokens(len(tok), tok.absent)
        add(net, os.path.join(FOLDER, arm))
        found = {}
        for cache, eviction in caches.items():
            found[cache] = evaluate(
                net, tok, problems, config=config, eviction=eviction, n=n)
        rewards = ", ".join(f"{cache} {each['reward']:.3f}"
                            for cache, each in found.items())
        yield (f"{arm}: reward {rewards}; overlap of both policies "
               f"{found['compressed']['accept']:.3f}")
        for cache, each in found.items():
            problem, text, reward = each["samples"][0]
            yield f"  {cache:10} {reward:.2f} {text!r:.200}"
        yield f"  answer          {problem.answer!r:.200}"


def main(argv=None):
    parser = Arguments("adapters", "answers of the adapters of naive and smd")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct",
                        help="their base model: a folder or a hub name")
    parser.add_argument("--problems", type=int, default=4,
                        help="how many held-out problems")
    args = parser.parse_args(argv)
    with one_line_errors(ValueError, OSError):
        settings = train.settings([
            os.path.join(ROOT, "config", "smollm2.py"), f"--model={args.model}",
            "--budget=256", f"--eval_batch={args.problems}"])
        choose_device(settings)
        for line in compare(settings, args.problems):
            tell(line)


if __name__ == "__main__":
    main()
