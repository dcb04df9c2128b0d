"""
A run's numbers in TensorBoard or Weights & Biases, if asked for.

The idea. log.jsonl is the record, a tracker a second look at it: the numbers of its rows under the
names that they have there, by step. So a tracker never ends a run: what fails is said once, and the
run goes on without. A package is imported only if it is asked for.

Steps that are done again after a kill are there once. TensorBoard drops what it has from the step
that is resumed on; W&B keeps what it has, as it takes no earlier row. The evaluation before that
step is not done again, so it is handed over again.

Left out: texts, histograms, weights. W&B's own switches are its environment variables.
"""
import importlib
import os

from support.jsonfile import reason
from support.run import LIST, failures, read_list, settings_kept
from support.screen import tell


class TensorBoard:
    """Event files in out_dir/tensorboard, listed there so that a later run may remove them."""

    def __init__(self, run):
        from torch.utils.tensorboard import SummaryWriter
        folder = run.path("tensorboard")
        os.makedirs(folder, exist_ok=True)
        there, before = set(os.listdir(folder)), read_list(folder)[1]
        purge = run.step if run.config.resume else None
        self.writer = SummaryWriter(folder, purge_step=purge)
        made = sorted(set(os.listdir(folder)) - there)
        run.write_list(folder, step=None, reward=None, files=[*before, *made, LIST])

    def log(self, step, numbers):
        for name, x in numbers.items():
            self.writer.add_scalar(name, x, step)
        self.writer.flush()  # whoever watches sees it now


class WandB:
    """A run of W&B, whose id is part of a checkpoint; its own files are in out_dir/wandb.

    W&B takes rows in the order of a count that it calls a step. A step has up to two rows, an
    evaluation and then its training, so that count is not the step: the step is a number among the
    others, over which they are drawn."""

    def __init__(self, run):
        import wandb
        self.run = wandb.init(
            id=run.memory.get("wandb"), resume="allow", dir=run.folder,
            name=run.config.out_dir, config=vars(run.config), allow_val_change=True,
            settings=wandb.Settings(console="off"))
        run.memory["wandb"] = self.run.id
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step, numbers):
        count = 2 * step + ("reward" in numbers)  # of training, not of an evaluation
        if count >= self.run.step:  # what it would ignore, with a warning each time
            self.run.log(dict(numbers, step=step), step=count)


# by the package that each needs
TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


def check_tracker(name):
    """Raise ValueError unless the package of a tracker is here; "none" needs none."""
    if name == "none":
        return
    try:
        with settings_kept():
            importlib.import_module(name)
    except failures() as e:  # whatever a broken installation raises
        raise ValueError(
            f"tracker={name} needs the package {name} (pip install {name}); "
            f"--tracker=none does without: {reason(e)}") from None


class Tracker:
    """Hands the rows of run's log on to run.config.tracker. already: rows of the step that is
    resumed, which stand in the log."""

    def __init__(self, run, already):
        self.name = run.config.tracker
        self.to = self.attempt(TRACKERS[self.name], run)
        for row in already:
            self.log(row)

    def log(self, row):
        if self.to:
            numbers = {name: x for name, x in row.items()
                       if isinstance(x, (int, float)) and name != "step"}
            self.attempt(self.to.log, row["step"], numbers)

    def attempt(self, act, *args):
        try:
            with settings_kept():
                return act(*args)
        except failures() as e:
            self.to = None
            tell(f"{self.name} failed and gets no more numbers, log.jsonl has them all:"
                 f" {reason(e)}")
