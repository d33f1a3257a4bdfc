"""Reading a page of HTML."""

from html.parser import HTMLParser
from typing import Any

VOID = {"input", "meta", "link", "img", "br", "hr"}


class Reader(HTMLParser):
    """Tags of a page in order, with a check that they are closed in the order they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: Any, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: Any, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        self.text += data

    def all(self, tag: Any) -> Any:
        return [attributes for name, attributes in self.tags if name == tag]
