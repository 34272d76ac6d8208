"""Chat templates and tokenizers that a hostile model could bring."""

from tokenizers import Regex, Tokenizer, pre_tokenizers

from router.text.chat import ChatTemplate
from router.text.tokenizer import ModelText, TextTokenizer
from tests.router.tiny_models import byte_level_tokenizer

# Each is harmless until a message says "boom".
_UNLESS = "{% if 'boom' not in messages[-1].content %}<|user|>{{ messages[-1].content }}{% else %}"
_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "nested loops": _ENDLESS,
    "power": "{{ 7 ** (7 ** messages|length * 99999999) }}",
    "constant power": "{{ 7 ** (7 ** 11) }}",
    "long string": "{{ 'a' * 10 ** 30 }}",
    "memory": "{{ 'a' * (4000000000 * messages|length) }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s * 2 %}"
    "{% endfor %}",
    "lone surrogate": "{{ '\\ud800' }}",
    "raised surrogate": "{{ raise_exception('\\ud800') }}",
    "encoding": "{{ 'x'.encode('none such') }}",
    "bytes": "{{ 'x'.encode(7) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "range": "{{ range(10 ** 12) | list }}",
    "padding": "{{ 'a' | center(messages|length * 10 ** 10) }}",
    "format": "{{ '%0*d' % (messages|length * 10 ** 9, 1) }}",
    "format()": "{{ '{:>9999999999}'.format('a') }}",
    "division": "{{ 1 // 0 }}",
    "infinite list": "{% set n = [1] %}{% for i in n %}{{ n.append(1) }}{% endfor %}",
    "lorem": "{{ lipsum(n=10 ** 9) }}",
    "nothing": "{{ nothing.at.all }}",
}


def template(name):
    return _UNLESS + TEMPLATES[name] + "{% endif %}"


def model_with_template(source):
    return ModelText(TextTokenizer(byte_level_tokenizer()), ChatTemplate(source, {}))


def model_with_pattern(pattern):
    """Its tokenizer splits texts by the pattern first."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    return ModelText(TextTokenizer(tokenizer), None)
