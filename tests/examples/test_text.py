import random
import statistics
import time

import pytest

from pipeswift_lightning.examples.text import PAD, TextDataModule, collate, definitions


def ready(**kwargs) -> TextDataModule:
    data = TextDataModule(**kwargs)
    data.setup("fit")
    return data


def test_default_text_is_long_tailed_and_cheap() -> None:
    started = time.process_time()
    data = ready(max_len=2000)
    assert time.process_time() - started < 3.0
    lengths = [len(sample) for sample in data.train_samples]
    assert len(lengths) > 2000
    assert max(lengths) == 2001
    assert statistics.mean(lengths) > 1.3 * statistics.median(lengths)


def test_the_same_samples_every_time() -> None:
    first, second = ready(max_samples=300), ready(max_samples=300)
    assert first.train_samples == second.train_samples
    assert first.val_samples == second.val_samples


def test_validation_is_held_out() -> None:
    data = ready(max_samples=100, val_every=4)
    assert (len(data.train_samples), len(data.val_samples)) == (75, 25)


def test_setup_twice_reads_once() -> None:
    data = ready(max_samples=10)
    samples = data.train_samples
    data.setup("validate")
    assert data.train_samples is samples


def test_no_sample_holds_another() -> None:
    source = "\n".join(
        [
            "import x",
            "@decorated",
            "class A:",
            "    '''What A is.'''",
            "    @property",
            "    def f(self):",
            "        def inner(): ...",
            "    class B:",
            "        async def g(self): ...",
            "def h(): ...",
        ]
    )
    assert list(definitions(source)) == [
        "@decorated\nclass A:\n    '''What A is.'''",
        "@property\ndef f(self):\n    def inner(): ...",
        "class B:",
        "async def g(self): ...",
        "def h(): ...",
    ]


def test_folder_of_text(tmp_path) -> None:
    (tmp_path / "b.txt").write_text("second\nparagraph\n\n" + "x" * 25)
    (tmp_path / "a.md").write_text("first paragraph")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / ".hidden").write_text("not this")
    data = ready(path=str(tmp_path), max_len=15)
    assert data.val_samples + data.train_samples == [
        *(b"first paragraph", b"second\nparagrap"[:16] + b"h"),
        *(b"x" * 16, b"x" * 9),
    ]


def test_one_file_of_text(tmp_path) -> None:
    file = tmp_path / "text"
    file.write_text("one\n\ntwo\n\nthree")
    data = ready(path=str(file), val_every=2)
    assert (data.val_samples, data.train_samples) == ([b"one", b"three"], [b"two"])


def test_missing_path_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no text to train on: .*/nowhere does not exist"):
        ready(path=str(tmp_path / "nowhere"))


def test_empty_path_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path} has 0 samples.*Rule: .*Remedy: "):
        ready(path=str(tmp_path))


def test_broken_sources_are_skipped(tmp_path, monkeypatch) -> None:
    (tmp_path / "bad.py").write_text("def broken(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\ndef f(): ...\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("def skipped(): ...\n")
    (tmp_path / "good.py").write_text("def one(): ...\ndef two(): ...\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    data = ready()
    assert data.val_samples + data.train_samples == [b"def one(): ...", b"def two(): ..."]


def test_validation_share_is_checked() -> None:
    with pytest.raises(ValueError, match=r"val_every=1 .*Rule: .*Remedy: "):
        TextDataModule(val_every=1)


def test_batch_is_padded_to_its_longest() -> None:
    samples = [b"abcd", b"xy", b"pqr"]
    random.Random(0).shuffle(samples)
    batch = collate(samples)
    assert batch["tokens"].shape == batch["targets"].shape == batch["mask"].shape == (3, 3)
    for sample, *row in zip(
        samples, *(batch[n] for n in ("tokens", "targets", "mask")), strict=True
    ):
        tokens, targets, mask = row
        assert bytes(tokens[mask].tolist()) == sample[:-1]
        assert bytes(targets[mask].tolist()) == sample[1:]
        assert (tokens[~mask] == PAD).all()
        assert (targets[~mask] == PAD).all()
    assert batch["lengths"].tolist() == batch["mask"].sum(1).tolist()


def test_loaders_give_every_sample() -> None:
    data = ready(max_samples=50, batch_size=8)
    for loader, samples in (
        (data.train_dataloader(), data.train_samples),
        (data.val_dataloader(), data.val_samples),
    ):
        assert sum(len(batch["tokens"]) for batch in loader) == len(samples)
