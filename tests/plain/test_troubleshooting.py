"""What README and the help page quote from the node is what the code says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HELP = (ROOT / "web" / "docs" / "VCAttentionPatch.md").read_text(encoding="utf-8")


def said_by_the_code() -> str:
    """All sources, with strings that continue on the next line joined."""
    files = sorted([*(ROOT / "nodes").glob("*.py"), *(ROOT / "kernels").rglob("*.py"), *(ROOT / "web/js").glob("*.js")])
    return re.sub(r'"\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


def first_cells(section: str) -> list[str]:
    """The first column of a section's table, without its head."""
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows[1:] if not row.startswith("| ---")]


def quoted_in_readme() -> list[str]:
    (section,) = re.findall(r"^## Troubleshooting\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    return [text for cell in first_cells(section) for text in re.findall(r'"(.+?)"', cell)]


def quoted_in_help() -> list[str]:
    (section,) = re.findall(r"^\| it says \|.*?\n\n", HELP, re.DOTALL | re.MULTILINE)
    return [text for cell in first_cells(section) for text in cell.split(" / ")]


QUOTES = [*quoted_in_readme(), *quoted_in_help()]


# What a card's owner meets where a kernel is not used.
UNUSED_KERNEL = [
    "does not compile or run here",
    "self-test could not run",
    "self-test failed",
    "NVRTC could not compile",
    "this version has no GPU kernel for",
    "this GPU is of the family",
    "has no ... mode",
    "needs Triton",
    "the CUDA kernels need NVIDIA's cuda-bindings and NVRTC",
]


@pytest.mark.parametrize("page", ["readme", "help"])
@pytest.mark.parametrize("sentence", UNUSED_KERNEL)
def test_sentences_on_an_unused_kernel_are_quoted(page, sentence):
    quotes = quoted_in_readme() if page == "readme" else quoted_in_help()
    assert any(quote.startswith(sentence) for quote in quotes)


def test_every_sentence_of_a_self_test_is_quoted():
    """The guards hand ``verdict_of`` what it says when a test could not be made."""
    calls = re.findall(r'verdict_of\(.*"(.+)", card\)', said_by_the_code())
    assert len(calls) == 2
    assert set(calls) <= set(UNUSED_KERNEL)


def test_the_node_s_sentences_are_quoted():
    assert len(quoted_in_readme()) >= 10
    assert len(quoted_in_help()) >= 6


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quote_is_said_by_the_code(quote):
    code = said_by_the_code()
    for part in quote.split("..."):
        assert part.strip() in code


def test_links_inside_readme_lead_somewhere():
    heads = {
        re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in re.findall(r"^#+ (.*)", README, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= heads
    for path in re.findall(r"\]\((?!#|http)([^)]+)\)", README):
        assert (ROOT / path).is_file(), path
