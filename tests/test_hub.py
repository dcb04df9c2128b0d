"""
The download by name (model.find_checkpoint) against a hub on this machine: a thread that answers
as huggingface_hub expects, from a folder per repository, and can be told to break.
"""
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import load_file, save_file

from conftest import toy
from data.pretrain import write_json
from data.tokenizer import Tokenizer
from model import Transformer, find_checkpoint

COMMIT = "c0ffee" + "0" * 34
LFS = ".safetensors"  # files of this kind have a sha256, the others git's hash


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, url = self.server, urlsplit(self.path)
        hub.asked.append((self.command, url.path, self.headers.get("Range")))
        parts = url.path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name == "a/gated":
            return self.error(403, "GatedRepo", f"Access to model {name} is restricted.")
        if name not in hub.repositories:  # what the hub says to who is not logged in
            return self.error(401, "RepoNotFound", "Invalid username or password.")
        folder = hub.repositories[name]
        if parts[0] != "api":
            return self.file(os.path.join(folder, *parts[4:]))
        if parts[4] == "revision":
            return self.json(dict(id=name, sha=COMMIT, siblings=[]))
        files = [os.path.join(at, f) for at, _, files in os.walk(folder) for f in files]
        return self.json([self.listed(f, os.path.relpath(f, folder)) for f in files])

    def listed(self, file, path):
        oid, size = identity(file), os.path.getsize(file)
        entry = dict(type="file", path=path, size=size, oid=oid[:40])
        if file.endswith(LFS):
            entry["lfs"] = dict(oid=oid, size=size, pointerSize=100)
        return entry

    def error(self, status, code, message):
        self.answer(status, message.encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def json(self, content):
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def file(self, file):
        with open(file, "rb") as f:
            body = f.read()
        headers = {"ETag": f'"{identity(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, whole = 200, len(body)
        if self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            status, body = 206, body[start:]
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        self.answer(status, body, headers, breaks=os.path.basename(file) == self.server.breaks)

    def answer(self, status, body, headers, breaks=False):
        if breaks and self.command == "GET":
            if self.server.broken:
                return self.answer(500, b"", {})
            self.server.broken = True
        self.send_response(status)
        for key, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:len(body) // 2] if breaks else body)
        if breaks:
            self.close_connection = True
        return None

    def log_message(self, *args):
        pass


def identity(file):
    with open(file, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub, and a cache that is empty."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    server.repositories, server.asked, server.breaks, server.broken = {}, [], None, False
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()
    yield server
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def serve(hub, folder, name="a/model"):
    """A toy model in two shards, with what a repository may hold besides. -> the model"""
    net = toy()
    net.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    names, index = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
        save_file({n: tensors[n] for n in part}, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write_json(str(folder))  # data/tiny's tokenizer, and a config of its own
    (folder / "config.json").write_text(json.dumps(net.config.raw))
    for other in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/config.json",
                  "original/consolidated.00.safetensors"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("not asked for")
    hub.repositories[name] = str(folder)
    return net


def same(a, b):
    a, b = a.tensors(), b.tensors()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files(hub):
    """What was downloaded: {path in the repository: what was asked for}"""
    asked = [(path.split("/resolve/")[1].split("/", 1)[1], wanted)
             for how, path, wanted in hub.asked if how == "GET" and "/resolve/" in path]
    return {path: [wanted for p, wanted in asked if p == path] for path, _ in asked}


WANTED = {"config.json", "model-0.safetensors", "model-1.safetensors", "tokenizer.json",
          "model.safetensors.index.json", "tokenizer_config.json", "generation_config.json"}


def test_a_model_by_name(hub, tmp_path):
    net = serve(hub, tmp_path / "served")
    assert same(Transformer.from_pretrained("a/model"), net)
    assert not same(toy(seed=1), net)  # the control
    assert files(hub) == dict.fromkeys(WANTED, [None])  # each once, and nothing else
    tok, local = Tokenizer("a/model"), Tokenizer(str(tmp_path / "served"))
    assert tok.encode("coin 4768") == local.encode("coin 4768") and tok.stop_ids == local.stop_ids
    assert files(hub) == dict.fromkeys(WANTED, [None])  # the cache has it


def test_a_connection_that_breaks(hub, tmp_path, monkeypatch):
    """In the middle of a shard, and the hub is away for a while."""
    net = serve(hub, tmp_path / "served")
    size = os.path.getsize(tmp_path / "served" / "model-1.safetensors")
    half = f"bytes={size // 2 // 1000}000-"  # what arrived, in chunks
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.breaks = "model-1.safetensors"
    refused("a/model", "hub: .*500")
    assert hub.broken and files(hub)["model-1.safetensors"] == [None, half]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("a/model", "hub: ")  # half a model is none
    cached, = (tmp_path / "cache").glob("models--*/snapshots/*")
    assert not (cached / "model-1.safetensors").exists()
    with pytest.raises(FileNotFoundError, match="although model.safetensors.index.json lists it"):
        Transformer.from_pretrained(cached)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.breaks = None
    hub.asked.clear()
    assert same(Transformer.from_pretrained("a/model"), net)
    wanted, = files(hub)["model-1.safetensors"]
    assert wanted in (None, half)  # from the start, or from where it broke


def refused(name, says):
    with pytest.raises(FileNotFoundError, match=says) as e:
        find_checkpoint(name)
    assert "\n" not in str(e.value) and repr(name) in str(e.value) and len(str(e.value)) < 500


def test_names_that_give_nothing(hub):
    refused("a/none", "hub: no model has this name, .*HF_TOKEN")
    refused("a/gated", "hub: its owner has not given you access: .*HF_TOKEN")
    hub.server_close()
    hub.shutdown()  # nobody answers
    refused("a/model", "hub: ")


def test_without_a_network(hub, tmp_path, monkeypatch):
    net = serve(hub, tmp_path / "served")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("a/model", "hub: .*HF_HUB_OFFLINE=0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = find_checkpoint("a/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert find_checkpoint("a/model") == folder and hub.asked == []
    assert same(Transformer.from_pretrained("a/model"), net)


@pytest.mark.skipif(not hasattr(errors, "IncompleteSnapshotError"),
                    reason="an older huggingface_hub hands out incomplete folders")
def test_a_file_that_may_be_missing_is_missed(hub, tmp_path, monkeypatch):
    """Without tokenizer_config.json there would be no chat template, and nobody would say so."""
    serve(hub, tmp_path / "served")
    os.remove(os.path.join(find_checkpoint("a/model"), "tokenizer_config.json"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("a/model", "hub: .*tokenizer_config.json")


def test_other_weights_are_refused(hub, tmp_path):
    """A repository with pytorch_model.bin alone: the weights are not even fetched."""
    serve(hub, tmp_path / "served")
    for file in (tmp_path / "served").glob("model*"):
        os.remove(file)
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing .*no .bin") as e:
        Transformer.from_pretrained("a/model")
    assert "\n" not in str(e.value)
    assert files(hub).keys() == WANTED - {"model-0.safetensors", "model-1.safetensors",
                                          "model.safetensors.index.json"}
