"""The suite's core on the versions that users have, each in an environment.

    ./run matrix                     # the rows whose Python is here
    ./run matrix --row 2             # one of them; may be given again
    ./run matrix --root DIR          # with a newer Python in a Debian's
    directory;
                                     # may be given again
    ./run matrix --table             # what is kept of former runs

Each row makes a fresh environment of the committed files, with the exact
versions of tests/matrix_constraints.txt, and runs its tests. Results are kept
in .matrix/results.jsonl, by commit and constraints. docs/versions.md has them,
and says how to get another Python. A row whose Python is not here is left out.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]
DIRECTORY = ROOT / ".matrix"
CONSTRAINTS = pathlib.Path(__file__).parent / "matrix_constraints.txt"
RESULTS = DIRECTORY / "results.jsonl"
LIMIT_S = 45 * 60
NIGHTLY = "3.16.0.dev2026102704"
WHOLE = (
    *("tests/contract", "tests/parity", "tests/strategy", "tests/data"),
    *("tests/fit", "tests/hooks", "tests/keras_bridge", "tests/kernels"),
    *("tests/run", "tests/step", "tests/variables", "tests/multi_process"),
)
PART = (
    *("tests/test_import.py", "tests/contract", "tests/strategy"),
    *("tests/run", "tests/hooks/test_on_read.py"),
    *("tests/passes", "tests/planning/compile", "tests/reporting"),
)
NEW = (*PART, "tests/parity")
TLS = "tests/multi_process/test_mutual_tls.py"
NEWEST = {"numpy": "2.5.5", "scipy": "1.18.1", "h5py": "3.16.0"}
DEBIANS = {"3.13": "trixie", "3.14": "forky"}
VERSIONS = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "jax"
import jax, keras
print(json.dumps([sys.version.split()[0], keras.__version__, jax.__version__]))
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """Versions, and the tests that are run on them.

    Attributes:
      others: Versions in place of those in tests/matrix_constraints.txt.
      has_tensorflow: Whether TensorFlow is installed; files of tests that
        import it are left out else.
    """

    number: int
    python: str
    keras: str
    jax: str
    tests: tuple[str, ...] = WHOLE
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_tensorflow: bool = True

    @property
    def is_nightly(self):
        return ".dev" in self.keras

    def __str__(self):
        return f"row {self.number}: {self.python}, {self.keras}, {self.jax}"


ROWS = (
    Row(1, "3.11", "3.15.1", "0.10.2"),
    Row(2, "3.11", NIGHTLY, "0.10.2"),
    Row(3, "3.13", "3.15.1", "0.12.0.1"),
    Row(4, "3.13", NIGHTLY, "0.12.0.1"),
    Row(5, "3.13", "3.15.1", "0.11.2", (*PART, TLS)),
    Row(6, "3.12", "3.15.1", "0.12.0.1", PART),
    Row(7, "3.13", "3.15.1", "0.12.0.1", NEW, NEWEST),
    # Named, a file is read even if it imports TensorFlow, as the first does.
    Row(
        *(8, "3.14", "3.15.1", "0.12.0.1", NEW[1:], NEWEST),
        has_tensorflow=False,
    ),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a row's Python is: on this machine, or in a directory's Debian."""

    root: pathlib.Path | None = None

    def directory(self, row):
        """The row's clone, as this machine sees it."""
        base = self.root or DIRECTORY
        return base / (f"matrix-{row.number}" if self.root else str(row.number))

    def run(self, row, *words, **options):
        """Runs a command in the row's clone."""
        directory = self.directory(row)
        if self.root is None:
            return subprocess.run(words, cwd=directory, **options)
        script = f'cd /{directory.name} && exec "$@"'
        inside = ["/bin/sh", "-c", script, "sh", *words]
        return subprocess.run(
            ["chroot", str(self.root), *inside],
            env={"HOME": "/root", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
            **options,
        )

    def has(self, python):
        name = f"python{python}"
        if self.root is not None:
            return (self.root / "usr" / "bin" / name).exists()
        # A name may be on the PATH and still not run.
        found = shutil.which(name)
        words = [found or "false", "-c", "import ensurepip, venv"]
        return subprocess.run(words, capture_output=True).returncode == 0


def install(place, row):
    """Makes the row's environment; what it has, by the modules."""
    directory = place.directory(row)
    shutil.rmtree(directory, ignore_errors=True)
    words = ["git", "clone", "--quiet", str(ROOT), str(directory)]
    subprocess.run(words, check=True)
    (directory / "constraints.txt").write_text(list_constraints(row))
    check = {"check": True}
    place.run(row, f"python{row.python}", "-m", "venv", ".venv", **check)
    pip = (".venv/bin/python", "-m", "pip", "--disable-pip-version-check")
    words = ("install", "--quiet", "-c", "constraints.txt", "-e", ".")
    place.run(row, *pip, *words, *list_packages(row), **check)
    if row.others:
        # TensorFlow 2.21 asks for an older h5py, and works with a newer one.
        words = ("install", "--quiet", "--no-deps", *pins(row.others))
        place.run(row, *pip, *words, **check)
    if row.is_nightly:
        # It lies in the directory of `keras`: one must go before the other
        # comes.
        place.run(row, *pip, "uninstall", "--quiet", "-y", "keras", **check)
        nightly = f"keras-nightly=={row.keras}"
        words = ("install", "--quiet", "--no-deps", nightly)
        place.run(row, *pip, *words, **check)
    words = (".venv/bin/python", "-c", VERSIONS)
    done = place.run(row, *words, capture_output=True, text=True, **check)
    found = json.loads(done.stdout)
    expected = [row.python, row.keras, row.jax]
    same = map(str.startswith, found, expected)
    if not all(same):
        raise SystemExit(f"matrix: asked for {expected}, installed {found}")
    return found


def list_constraints(row):
    """The text of the row's constraints file."""
    lines = CONSTRAINTS.read_text().splitlines()
    lines = [line for line in lines if line.split("==")[0] not in row.others]
    return "\n".join([*lines, *pins({"jax": row.jax, "jaxlib": row.jax}), ""])


def pins(versions):
    return [f"{name}=={version}" for name, version in versions.items()]


def list_packages(row):
    """What the row's tests need beside the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = project["optional-dependencies"]["test"]
    return [p for p in packages if row.has_tensorflow or "tensorflow" not in p]


def left_out(row):
    """Says that a row's Python is not here, and how to get it."""
    text = f"{row}: left out, no Python {row.python}."
    debian = DEBIANS.get(row.python)
    if debian is None:
        return f"{text} Install it, with its venv module."
    packages = f"python{row.python},python{row.python}-venv"
    return (
        f"{text} Debian's {debian} has it: as root, `debootstrap --variant="
        f"minbase --include={packages},git,ca-certificates,procps {debian} "
        "DIR MIRROR /usr/share/debootstrap/scripts/sid`, mount /proc and /dev "
        "in DIR, and give `--root DIR` (docs/versions.md)."
    )


def choose_marks():
    """Returns what `./run test` selects, and the tests of several processes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    options = project["tool"]["pytest"]["ini_options"]["addopts"]
    return options[options.index("-m") + 1].replace(
        " and not multi_process", ""
    )


def measure(place, row):
    """Runs the row's tests; what came of it."""
    found = install(place, row)
    start = time.monotonic()
    report = place.directory(row) / "results.xml"
    words = [".venv/bin/python", "-m", "pytest", *row.tests]
    words += ["-m", choose_marks(), "-q", "--junitxml=results.xml"]
    if row.is_nightly:
        words = ["env", "KERAS_STRATEGIES_UNTESTED_VERSIONS=1", *words]
    try:
        # An interrupted pytest still writes its report.
        limit = ("timeout", "--signal=INT", "--kill-after=60", str(LIMIT_S))
        done = place.run(row, *limit, *words)
    finally:
        seconds = time.monotonic() - start
    counts, failed = {}, ["no report: cut off, or not begun"]
    if report.exists():
        counts, failed = read(report)
    if done.returncode and not failed:
        failed = [f"pytest ended with {done.returncode}"]
    return {
        "commit": commit(),
        "constraints": constraints(),
        "row": row.number,
        "date": datetime.date.today().isoformat(),
        "versions": found,
        "minutes": round(seconds / 60, 1),
        "counts": counts,
        "failed": failed,
    }


def read(report):
    """Counts of tests, and the names of those that failed."""
    suite = xml.etree.ElementTree.parse(report).getroot()[0]
    counts = {
        name: int(suite.get(name, 0))
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return counts, failed


def commit():
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(words, cwd=ROOT, text=True).strip()


def constraints():
    """A short name of the constraints file's contents."""
    return hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:8]


def show():
    """Prints the last result of each row."""
    kept = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    last = {entry["row"]: entry for entry in map(json.loads, kept)}
    print("| row | Python | Keras | JAX | tests | failed | minutes | of |")
    print("|---|---|---|---|---|---|---|---|")
    for number, entry in sorted(last.items()):
        cells = [
            number,
            *entry["versions"],
            entry["counts"].get("tests", "-"),
            len(entry["failed"]),
            entry["minutes"],
            f"{entry['commit']}, {entry['date']}",
        ]
        print("|", " | ".join(map(str, cells)), "|")
    for number, entry in sorted(last.items()):
        for name in entry["failed"]:
            print(f"row {number} failed: {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = [row.number for row in ROWS]
    parser.add_argument("--row", type=int, action="append", choices=numbers)
    parser.add_argument(
        "--root",
        type=pathlib.Path,
        action="append",
        help="a Debian's directory",
    )
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    DIRECTORY.mkdir(exist_ok=True)
    places = [Place()]
    for root in options.root or ():
        if not (root / "usr" / "bin").is_dir():
            parser.error(f"--root: no Debian in {root} (no usr/bin)")
        if not (root / "proc" / "self").exists():
            parser.error(f"--root: mount /proc in {root} (docs/versions.md)")
        places.append(Place(root.resolve()))
    wanted = [r for r in ROWS if r.number in (options.row or numbers)]
    is_green = True
    for row in [] if options.table else wanted:
        place = next((p for p in places if p.has(row.python)), None)
        if place is None:
            print(left_out(row), flush=True)
            is_green &= not options.row
            continue
        print(row, flush=True)
        entry = measure(place, row)
        with RESULTS.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        is_green &= not entry["failed"]
        shutil.rmtree(place.directory(row), ignore_errors=True)
    show()
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
