from __future__ import annotations

import pytest

from longctx.train.data.reading.encodings import guess

TEXTS = {
    "French": "Le café était fermé à Noël ; l'été prochain, où irons-nous ? Ça dépend de l'élève.",
    "French in short": "Un été à la plage, déjà vu.",
    "German": "Die Straße war schön, aber die Tür blieb für Müller geschlossen. Äpfel und Öl.",
    "Spanish": "El niño comió piña en España; ¿qué más? Mañana será otro día.",
    "Portuguese": "Não há coração sem emoção; a informação está à mão.",
    "Italian": "Perché è così? La città è più bella, però costa.",
    "Swedish": "Får får får? Nej, får får inte får, får får lamm. Ö är en ö i ån.",
    "quotes": "He said “no”, and that’s all – or so they say.",
    "Polish": "Zażółć gęślą jaźń, proszę państwa. Wczoraj poszedłem do sklepu, żeby kupić masło.",
    "Czech": "Příliš žluťoučký kůň úpěl ďábelské ódy. Dnes je krásný den a slunce svítí.",
    "Hungarian": "Árvíztűrő tükörfúrógép őrült írók. Szép nap van ma, ugye?",
    "Turkish": "Şu çılgın Türkçe ağaç üzüm ığdır. Bugün hava çok güzel, değil mi?",
    "Russian": "Это обычный русский текст в старой кодировке. Он лежит в файле.",
    "Japanese": "これは普通の日本語の文章です。",
}
CASES = [
    *(("cp1252", name) for name in [*TEXTS][:8]),
    *(("mac_roman", name) for name in ("French", "German", "Italian")),
    *(("cp850", name) for name in ("French", "German")),
    *(("cp1250", name) for name in ("Polish", "Czech", "Hungarian")),
    *(("cp1254", "Turkish"), ("cp1251", "Russian"), ("cp866", "Russian"), ("cp932", "Japanese")),
]


@pytest.mark.parametrize("copies", [1, 30])
@pytest.mark.parametrize(("encoding", "name"), CASES)
def test_an_encoding_of_the_web_is_proposed(encoding, name, copies):
    """charset-normalizer alone proposes cp1257, mac_latin2 or cp1125 for some of these."""
    found = guess((TEXTS[name] + " ").encode(encoding) * copies)
    assert found is not None and found.name == encoding
    assert not found.excerpt.isascii() and found.excerpt in " ".join(TEXTS[name].split() * 2)
