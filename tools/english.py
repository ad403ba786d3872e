"""List the docstrings, comments and pages whose English breaks the project's rules.

    python tools/english.py                    the whole checkout
    python tools/english.py speedswap/tables   these files and folders

Functions open with an imperative verb; properties, classes, modules and tests may open with a noun phrase; none opens
with a question word. Phrases in ``PHRASES`` have a plainer form, which is printed with each violation.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("speedswap", "csrc", "tests", "tools", "benchmarks", "docs", "colab", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = {".py", ".md", ".cpp", ".h", ".cuh", ".cu", ".ipynb"}
THIS = {"english.py", "test_english.py"}  # they quote what they look for

QUESTIONS = set("what how whether where which who whom whose why something somebody whoever whatever".split())
NOT_VERBS = QUESTIONS | set(
    """
    a an the one two three four five six seven eight nine ten both all any each every everything everybody nothing
    nobody no none not only some several many few another other others it its they their those these this that there
    here we our ours you your i as at after also always and around back be because before between but by during for
    from if in instead into just like of on once or out outside over since so than then through to under until
    when while with within without yet true false bytes byte number numbers rows memory ids values value names words
    seconds microseconds milliseconds tensors losses scores batches samples sizes steps gradients gradient weights
    figures positive random small first last same earlier ordinary such machine manifest data parameters json
    """.split()
)
# Imperatives that look like a plural or a third person, a participle or a gerund.
VERBS = set(
    """
    access address bypass compress discuss express focus guess miss pass press process suppress toss
    bring embed exceed feed need proceed read seed shed shred speed spread string
    """.split()
)

GAP = r"""(?:[\s#/*>]|"\s*f?")+"""  # between two words, which a line break in a comment or a literal may part
PHRASES = {
    r"(?:cannot|can't|could not|to|not) be had": "unavailable, could not be allocated",
    r"(?:memory|what|those|one|all|files?|rows|tables?|nothing|everything) that there (?:is|are|was|were)": "existing",
    r"what there (?:is|are|was|were)": "the noun itself",
    r"than there (?:is|are)": "than exist",
    r"those (?:that|which|who) nobody": "idle, unused",
    r"that nobody": "unused, unowned",
    r"nobody (?:waits|knows|asks|uses|reads|needs|will|has|is|was|else)": "nothing, no caller, or the passive",
    r"of which (?:nobody|nothing|there|it|they|one|no)": "rewrite the clause",
    r"whoever": "the caller, any caller",
    r"(?:is|are|was|were) not to be": "must not be, cannot be",
    r"ought (?:not )?to": "should",
    r"one of both": "one of them",
    r"(?:told|said) (?:to|of) (?:whoever|whatever)": "reported",
    r"what is what": "delete",
    r"in the order of their coming": "in creation order",
    r"at the most": "at most",
    r"in the place of": "in place of",
    r"(?:is|are|was|were) made again": "is rebuilt",
    r"its like|their like|the likes? of it": "such",
    r"(?:bytes|burst|tensor|scale|launch|entry) an? "
    r"(?:row|column|batch|step|chunk|micro-batch|table|lookup|id|sample|record|rank)(?=[\s,.;:)])": "per row",
    r"(?<!there\s)is no (?!longer|more|less|better|worse|faster|slower|larger|smaller|different)"
    r"[\w.]+": "is not a, is not an",
    r"(?:hand|hands|handed|handing) over": "forward, pass",
    r"CPU engine": "CPU loops",
    r"let(?:s|ting)? (?:the failed attempt|it|them|him) go": "release",
    r"in vain": "without effect",
    r"there to be": "rewrite",
    r"wants? to know": "asks",
    r"as good as": "almost",
    r"of old": "former",
    r"given out": "returned, allocated",
    r"so many(?! (?:images|samples|times|users))": "n rows, or the parameter's name",
    r"(?:(?!opened)\w+ed|made|makes?|built|read|up|trains?|joins?|starts|begins|begun|batch|epoch|job|each) anew": (
        "again, from scratch, over; is reset"
    ),
    r"(?:and|but|while|if|than|to|within|put|putting|until|for|by|there|the|on|or|wraps|writes|takes|sets?|after) "
    r"another one": "another, or the noun",
    r"of their own(?! (?:is 0|train as))": "separate, private, or leave it out",
    r"(?:batch(?:es)?|blocks|cgroup|child|core|counter|dtypes?|effects|events?|file system|gradients?|graphs?|groups?"
    r"|jobs?|kind|lanes?|locks?|lookups?|machine|memory|messages?|options|pace|pieces?|process(?:es)?|programs?|queries"
    r"|records?|runtime|sectors|settings|state|steps|stores?|streams?|tasks?|tensors?|tests?|threads?|versions?) "
    r"of its own": "separate, private, or leave it out",
    r"(?:computation|costs?|engines|figures|floor|goals?|graphs?|it|large|limits|log|loops?|machine|numbers|parameters"
    r"|peers?|process|results|returned|run|scalars|splitting|take|time|training|vectors?) beside": (
        "compared with, next to, in addition to, during"
    ),
    r"beside each other": "side by side",
    r"(?:attached|caches?|does|ends?|finds?|freed?|goes|id|learns?|process|row|shrinks?|stops?|that|them) "
    r"by (?:itself|themselves)": "alone, unaided, separately",
    r"(?:addresses|files?|keys|map|rows|state|tables?|those|values) of before": "former, existing",
    r"where there (?:is|are) none": "without one, or None",
}
IN_WORD = re.compile(r"[\w-]")
COMPILED = [
    (re.compile(r"(?:" + pattern.replace(" ", GAP) + r")(?![\w-])"), better) for pattern, better in PHRASES.items()
]

Violation = tuple[int, str]


def violations(path: Path) -> list[Violation]:
    """Return the line and the complaint of each violation in one file."""
    text = path.read_text()
    found = list(_phrases(text))
    if path.suffix == ".py":
        found += _docstrings(ast.parse(text))
    return sorted(found)


def _phrases(text: str) -> Iterator[Violation]:
    text = "\n" + text.lower()
    for pattern, better in COMPILED:
        end = 0
        while match := pattern.search(text, end):
            if IN_WORD.match(text, match.start() - 1):  # five times as fast as a pattern that looks behind itself
                end = match.start() + 1
                continue
            end = match.end()
            said = " ".join(re.findall(r"[\w'-]+", match[0]))
            yield text.count("\n", 0, match.start()), f"{said!r}: {better}"


def _docstrings(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        doc = ast.get_docstring(node)
        if not doc:
            continue
        opening = doc.split()[0]
        word = re.sub(r"\W+$", "", opening).lower()
        line = node.body[0].lineno
        if word in QUESTIONS:
            yield line, f"docstring opens with {opening!r}: a verb for a function, a noun phrase otherwise"
        elif not isinstance(node, (ast.Module, ast.ClassDef)) and _needs_verb(node) and not _is_verb(word):
            yield line, f"docstring of {node.name}() opens with {opening!r}: open with an imperative verb"


def _needs_verb(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return False for properties, fixtures, tests and special methods, whose docstrings may be noun phrases."""
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    exempt = re.search(r"property|fixture|\.setter|overload", decorators)
    return not (exempt or function.name.startswith("test") or re.fullmatch(r"__\w+__", function.name))


def _is_verb(word: str) -> bool:
    if word in VERBS:
        return True
    if word in NOT_VERBS or not re.fullmatch(r"[a-z]+(-[a-z]+)?", word):
        return False
    return not re.search(r"(?<!s)s$|ed$|(?<!r)ing$", word)


def files(paths: Sequence[Path]) -> list[Path]:
    """Return the files under some paths that the rules apply to."""
    found = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return sorted(file for file in found if file.suffix in SUFFIXES and file.name not in THIS and file.is_file())


def everything() -> list[Path]:
    """Return every file of the checkout that the rules apply to."""
    return files([ROOT / name for name in (*FOLDERS, *PAGES)])


def main(arguments: list[str]) -> int:
    """Print each violation as ``path:line: complaint`` and return 1 if there was any."""
    chosen = files([Path(argument).resolve() for argument in arguments]) if arguments else everything()
    count = 0
    for path in chosen:
        for line, complaint in violations(path):
            count += 1
            print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {complaint}")
    print(f"{count} violations in {len(chosen)} files", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
