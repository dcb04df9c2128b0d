"""
Which problem comes when: the training and the held-out stream of a task or a file, with prompts as token ids.
"""
from data.tasks import HOLD_OUT, TASKS, file_problem, problem, prompt_encoder, read_problems


class Problems:
    """Problems of a task and their prompts as token ids, by index. A file is checked as a whole at the start.

    task: a name in TASKS or a .jsonl file. tokens: longest prompt. n_eval: held-out problems wanted; a file may have fewer.
    Raises ValueError, naming the problem, for a prompt that is empty or too long."""

    def __init__(self, task, seed, tokens, n_eval, tok):
        self.task, self.seed, self.tokens, self.encode = task, seed, tokens, prompt_encoder(tok)
        self.file = None if task in TASKS else read_problems(task)
        self.n_eval = n_eval if self.file is None else min(n_eval, -(-len(self.file) // HOLD_OUT))
        some = [self.get(split, [0])[0][0] for split in ("eval", "train")]
        for i, p in enumerate(self.file or some):
            n = len(self.encode(p.text))
            if not 0 < n <= tokens:
                raise ValueError(f"problem {i + 1} of {task} has {n} tokens, prompt_tokens is {tokens}")

    def get(self, split, indices):
        """-> problems number `indices` of a split, "train" or "eval"; their prompts"""
        out = [self.one(split, i) for i in indices]
        return out, [self.encode(p.text) for p in out]

    def one(self, split, i):
        if self.file is None:
            return problem(self.task, split, self.seed, i, self.tokens, self.encode)
        return file_problem(self.file, split, self.seed, i)
