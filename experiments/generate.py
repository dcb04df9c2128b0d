"""generate under a compressed cache"""
import os

from rollout import generate

if __name__ == "__main__":  # python rollout.py --prompt "..." [--model folder or hub name]: generate under a compressed cache
    import argparse
    import os

    from model import Transformer, find_checkpoint
    from data.tasks import prompt_encoder
    from data.tokenizer import Tokenizer
    a = argparse.ArgumentParser(description="generate under a compressed KV cache")
    a.add_argument("--prompt", required=True)
    a.add_argument("--model", default=os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "tiny"))
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in dict(group=1, max_new_tokens=64, temperature=0.0, evict="snapkv", budget=256, window=32, sinks=4, pool=7,
                              response_budget=0, period=128, seed=0).items():
        a.add_argument(f"--{name}", default=default, type=type(default))
    a = vars(a.parse_args())
    a["response_budget"] = a["response_budget"] or None
    try:
        folder, prompt, device = find_checkpoint(a.pop("model")), a.pop("prompt"), a.pop("device")
        tok = Tokenizer(folder)
        net = Transformer.from_pretrained(folder, device, torch.bfloat16 if device.startswith("cuda") else torch.float32)
        net.vocab_used = min(len(tok), net.config.vocab_size)
        ids = prompt_encoder(tok)(prompt)
        r = generate(net, [ids], stop_ids=tok.stop_ids, **a)
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}")
    for tokens, n in zip(r.tokens[0].tolist(), r.lengths[0].tolist()):
        print(tok.decode(tokens[:n]))
    print(f"[{len(ids)} prompt tokens, {r.kept[0].shape[2]} kept per layer and KV head ({a['evict']}); "
          f"KV bytes {r.kv['kept']:,}, dense {r.kv['dense']:,}]")
