"""
A checkpoint's files: where they are, a folder or a name on the hub, and the tensors in them.

Every file is an outsider's: what is missing, cut short, listed elsewhere or of another kind is
refused in one line that names it. Weights are read from safetensors alone.
"""
import os
import re

import torch

from support.jsonfile import entry, read_json, shown
from support.run import is_of_a_run

HERE = re.compile(r"[\w.-]+\.safetensors")  # a file in the same folder
DTYPES = ("F64", "F32", "BF16", "F16")  # of tensors, as safetensors calls them


def find_checkpoint(path):
    """A local folder as it is; otherwise download the hub repository of that name. -> folder.
    Raises FileNotFoundError; ValueError for an adapter."""
    folder = os.path.expanduser(str(path))
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{folder} is a file: name the folder that holds config.json")
    if is_of_a_run(os.path.join(folder, "config.json")):
        raise FileNotFoundError(
            f"{folder} is a run's folder: use --model={folder}/model or {folder}/best")
    if not os.path.isdir(folder):
        if folder.startswith(("/", ".", "~")) or folder.count("/") > 1:
            raise FileNotFoundError(f"{shown(path)}: no such folder")
        folder = download(path)
    # transformers and peft would add it to the weights
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise ValueError(
            f"{folder} holds an adapter (adapter_config.json), which is not read here: "
            "name a folder with merged weights, such as a run's model/ (in peft: "
            "merge_and_unload, then save_pretrained)")
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise FileNotFoundError(f"{folder} holds no config.json")
    return folder


def download(name):
    """-> folder of the hub repository in the local cache. Raises FileNotFoundError."""
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            # the same weights in other layouts
            ignore_patterns=["*/*", "consolidated*"])
    except Exception as e:
        raise FileNotFoundError(
            f"{shown(name)} is no local folder and could not be downloaded from the "
            f"hub: {why_not(e)}") from None


def why_not(error):
    """What huggingface_hub raises, in a line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    if isinstance(error, GatedRepoError):
        return ("its owner has not given you access: ask on the model's page, then log "
                "in or set HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return "no model has this name, or only those who log in may see it (HF_TOKEN)"
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_tensors(path, config, dtype):
    """{name as in Transformer.tensors(): (file, tensor)}, views of the files in folder `path`, read
    when copied.

    Where config.json says tied and the checkpoint holds a head that differs, the head counts, as
    in transformers; the config then says so. Raises ValueError for a tensor that is there twice,
    and for another number of layers: a model of 10**6 layers must not even be begun."""
    tensors = {}
    for file, name, tensor in read_safetensors(path):
        name = name.removeprefix("model.")
        if name in tensors:
            raise ValueError(f"{path}: tensor {shown(name)} is there twice")
        if not name.endswith("rotary_emb.inv_freq"):  # old exports store RoPE's table
            tensors[name] = file, tensor
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(layers) < config.n_layer:
        raise ValueError(f"{path}: config.json says {config.n_layer} "
                         f"num_hidden_layers, the weights have {len(layers)}")
    if config.tied and {"lm_head.weight", "embed_tokens.weight"} <= tensors.keys():
        _, head = tensors["lm_head.weight"]
        _, embedding = tensors["embed_tokens.weight"]
        if torch.equal(head.to(dtype), embedding.to(dtype)):
            del tensors["lm_head.weight"]
        else:
            config.tied = False
            config.raw["tie_word_embeddings"] = False
    return tensors


def check_names(path, wanted, tensors):
    """Raises ValueError unless the tensors are those wanted, by name and shape."""
    missing = wanted.keys() - tensors.keys()
    unused = tensors.keys() - wanted.keys()
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} tensor(s), e.g. {min(missing)}")
    if unused:
        raise ValueError(
            f"{path} has unused {len(unused)} tensor(s), e.g. {shown(min(unused))}")
    for name, tensor in wanted.items():
        file, found = tensors[name]
        if found.shape != tensor.shape:
            raise ValueError(f"{file}: {name} has shape {tuple(found.shape)}, "
                             f"config.json implies {tuple(tensor.shape)}")


def copy_finite(wanted, tensors):
    """Copy the tensors into those wanted. Raises ValueError for one that holds NaN or infinity, or
    what becomes infinite."""
    for name, tensor in wanted.items():
        file, found = tensors[name]
        tensor.copy_(found)
        # one reading without a copy: NaN and infinity reach the least or the largest
        if not torch.stack(tensor.aminmax()).isfinite().all():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{file}: tensor {name} holds NaN, infinity or a number "
                             f"too large for {dtype}")


def read_safetensors(path):
    """Yield (file, name, tensor) from model.safetensors or, without it, from the shards that the
    index lists; no stray file is read."""
    from safetensors import SafetensorError, safe_open
    shards = read_index(path) or {"model.safetensors": None}
    for shard, listed in shards.items():
        file = os.path.join(path, shard)
        if not os.path.isfile(file):  # a FIFO would be waited for
            why = ": weights are read from safetensors, no .bin"
            if listed:
                why = ", although model.safetensors.index.json lists it"
            raise FileNotFoundError(f"{file} is missing or not a file{why}")
        try:
            with safe_open(file, framework="pt") as f:
                lost = set(listed or ()) - set(f.keys())
                if lost:
                    raise ValueError(f"{file} lacks tensor {shown(min(lost))}, which "
                                     "model.safetensors.index.json lists")
                for name in listed or f.keys():
                    kind = f.get_slice(name).get_dtype()
                    if kind not in DTYPES:
                        raise ValueError(f"{file}: tensor {shown(name)} has dtype "
                                         f"{kind}, this code reads {', '.join(DTYPES)}")
                    yield file, name, f.get_tensor(name)
        # TypeError: a tensor without elements whose other sizes are absurd
        except (SafetensorError, TypeError) as e:
            why = " ".join(str(e).split())[:200]
            raise ValueError(
                f"{file} is truncated or not a safetensors file: {why}") from None


def read_index(path):
    """{shard: its tensors} of a checkpoint in shards, None of one in a single file. Raises
    ValueError, which names the file; a shard outside the folder is refused."""
    whole = os.path.join(path, "model.safetensors")
    index = os.path.join(path, "model.safetensors.index.json")
    # as in transformers: a checkpoint saved over a sharded one leaves the old index behind
    if os.path.exists(whole) or not os.path.exists(index):
        return None
    shards = {}
    try:
        for name, shard in entry(read_json(index), "weight_map", dict).items():
            if not isinstance(shard, str) or not HERE.fullmatch(shard):
                raise ValueError(f"{shown(name)} is in {shown(shard)}, which does not "
                                 "name a .safetensors file in this folder")
            shards.setdefault(shard, []).append(name)
        if not shards:
            raise ValueError("weight_map lists no tensor")
    except ValueError as e:
        raise ValueError(f"{index} is not a valid index of shards: {e}") from None
    return dict(sorted(shards.items()))
