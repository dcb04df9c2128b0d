"""draw what each method keeps"""
from kvcache import EVICT

if __name__ == "__main__":  # draw what each method keeps of one prompt of the embedded checkpoint, a line per layer and KV head
    import os

    from model import Transformer
    from rollout import generate
    from data.tasks import problem, prompt_encoder
    from data.tokenizer import Tokenizer
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "tiny")
    net, tok = Transformer.from_pretrained(folder), Tokenizer(folder)
    p = problem("kv", "eval", 0, 1, 120, prompt_encoder(tok))
    ids = prompt_encoder(tok)(p.text)
    print(f"{p.text}\nanswer {p.answer}; {len(ids)} tokens; s sink, k kept, w window, . dropped; ^ the answer in the prompt")
    for evict in EVICT:
        r = generate(net, [ids], 1, 5, 0.0, evict, budget=24, window=16, sinks=2, stop_ids=tok.stop_ids)
        print(f"\n{evict}: {r.kept[0].shape[2]} keys, greedy answer {tok.decode(r.tokens[0, 0, :r.lengths[0, 0]].tolist())!r}")
        for layer, heads in enumerate(r.kept[0].tolist()):
            for head, kept in enumerate(heads):
                mark = lambda j: "." if j not in kept else "s" if j < 2 else "w" if j >= len(ids) - 16 else "k"
                print(f"layer {layer} head {head} {''.join(map(mark, range(len(ids))))}")
    code = tok.encode(p.answer)
    at = [j for j in range(len(ids)) if ids[j:j + len(code)] == code]
    print(" " * 15 + "".join("^" if any(s <= j < s + len(code) for s in at) else " " for j in range(len(ids))))
