"""shadow_mask/: the project's files from another folder, whose own files have the same names."""
import inspect

import numpy as np
import pytest

from fast import launch

# in a process that works beside the other tests, with the kernels in Triton's interpreter
BESIDE = """
import os, pathlib, pickle, sys, tempfile
os.environ["TRITON_INTERPRET"] = "1"
package = os.path.abspath("shadow_mask")

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    os.symlink(package, "shadow_mask")  # what pip install -e . leads to
    os.mkdir("data")
    for name in ("model.py", "kvcache.py", "data/__init__.py"):
        with open(name, "w") as f:
            f.write("raise ImportError('theirs')")
    with open("train.py", "w") as f:
        f.write("def f(): pass")
    import train
    import shadow_mask
    shadow_mask.NAMES.remove("kvcache")
    try:
        from shadow_mask.rollout import generate
    except ImportError as e:
        print("control:", e)
    shadow_mask.NAMES.add("kvcache")

    import shadow_mask.experiments.forced
    from shadow_mask import train as ours
    from shadow_mask.data.tokenizer import Tokenizer
    from shadow_mask.fast.launch import interpreted, triton
    from shadow_mask.grpo import replay
    from shadow_mask.kvcache import Eviction
    from shadow_mask.model import Transformer
    from shadow_mask.rollout import Rollout, generate
    from shadow_mask.support.own import find_own
    tiny = shadow_mask.ROOT / "data" / "tiny"
    net, tok = Transformer.from_pretrained(tiny), Tokenizer(tiny)
    ids = tok.encode("The code for coin is 4768. Repeat each word with its code: coin. Answer:")
    rollout = generate(net, [ids], group=2, max_new_tokens=4,
                       eviction=Eviction("snapkv", budget=19, window=13, sinks=2))
    logp = replay(net, rollout)
    print("kernels:", interpreted() == (triton is not None))
    for policy in ("dense", "shadow"):
        print(policy, (logp[policy] - rollout.logp_roll).abs().max().item() < 1e-4)
    print("pickled:", type(pickle.loads(pickle.dumps(rollout))) is Rollout)
    print("theirs:", find_own("train:f", "reward")[0] is train.f, ours.generate is generate)
    print("loaded:", sorted(shadow_mask.NAMES & {*sys.modules}),
          [path for path in map(pathlib.Path, sys.path)  # an environment may lie deeper in it
           if shadow_mask.ROOT in (path, path.parent)])
"""


def no_loops():
    """Are the bounds of loops beyond Triton's interpreter? That of 3.6 has them as arrays of one
    number, which numpy from 2.4 on does not take for one."""
    if launch.triton is None:
        return False
    try:
        int(np.array([1]))
    except TypeError:
        from triton.runtime import interpreter
        return "int(self.handle.data))" in inspect.getsource(interpreter)
    return False


@pytest.mark.skipif(no_loops(), reason="this Triton's interpreter does not go with this numpy")
def test_import_from_another_folder(beside):
    """A rollout is replayed. Control: a name that is not known for the project's is theirs."""
    assert beside.splitlines() == [
        "control: theirs", "kernels: True", "dense False", "shadow True", "pickled: True",
        "theirs: True True", "loaded: ['train'] []"]
