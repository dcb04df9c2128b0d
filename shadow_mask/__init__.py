"""
The project as one package, to be imported from anywhere: pip install -e .

    from shadow_mask.model import Transformer
    from shadow_mask.rollout import generate

The idea. The files at the root import each other by their bare names, as `python train.py` needs.
Imported as shadow_mask.train they are modules of their own, in which an import of one of these
names, from model import Transformer, means shadow_mask.model. Only they are given this __import__:
whoever has a model.py or a folder named data goes on with that.

Left out: an installation without the checkout, which is what is imported; python -m shadow_mask.x.
"""
import builtins
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = {path.stem for path in ROOT.glob("*.py")}
NAMES |= {path.parent.name for path in ROOT.glob("*/__init__.py")} - {__name__}
if "train" not in NAMES:
    raise ImportError(f"{__name__} needs the checkout: run pip install -e . there")
__path__ = [str(ROOT)]  # where shadow_mask.model and the others are looked for


class Loader(SourceFileLoader):
    def exec_module(self, module):
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_here}
        super().exec_module(module)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        package, _, below = name.partition(".")
        if package != __name__ or below.partition(".")[0] not in NAMES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin:
            spec.loader = Loader(name, spec.origin)
        return spec


def import_here(name, scope=None, names=None, wanted=(), level=0):
    """What `import name` and `from name import wanted` mean in a file of the project."""
    top = name.partition(".")[0]
    if level or top not in NAMES:
        return builtins.__import__(name, scope, names, wanted, level=level)
    found = builtins.__import__(f"{__name__}.{name}", scope, names, wanted)
    return found if wanted else getattr(found, top)


sys.meta_path.insert(0, Finder)
