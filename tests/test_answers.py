r"""
data/answers.py: every rule of RULES against a table of texts. What a text is worth was written
down before the rules were run: what a careful teacher would pay, who would rather miss a right
answer than pay a wrong one.
"""
import importlib.util
import random
import signal
import threading
import time
from collections import Counter

import pytest

from data import answers
from data.answers import RULES, after_thought

# rule: (gold answer, responses that are right, responses that are wrong)
CASES = {
    "exact": [
        ("Paris", ["Paris", "paris.", "PARIS!", "  Paris\n", '"Paris."', "(**Paris**)", "**Paris**",
         "`Paris`", "Paris?!", "“Paris”", "Pa\u200bris", "‘Paris’", r"\text{Paris}",
         "<think>Rome?</think>Paris"], ["Pari", "Parisian", "in Paris", "Rome", "", "...", "?!",
         "**Answer:** Paris", "# Paris", "*Paris", "Paris or Rome", "Paris, Rome", "Paris Paris",
         "Rome\nParis", "\u0420\u0430ris",
         "What is the capital of France? Paris", "<think>Paris</think>Rome",
         "<think>Paris", "Paris<|im_end|>"]),
        ("New York", ["new\nyork"], ["NewYork", "York New"]),
        ("well-known", ["well‑known"], ["well known"]),
        ("café", ["cafe\u0301"], ["cafe"]),
        ("straße", ["STRASSE"], []),
        ("x+1", [r"\boxed{x+1}"], []),
        ("x=3", ["x = 3"], ["3", "x = 4"]),
        ("1/2", [r"\frac{1}{2}", "1/2"], ["0.5", "2/1"]),
        ("12 km", ["12 km.", "12 km"], ["12 m", "12", "12km"]),
        ("B", ["(b).", "B", r"\boxed{B}"], ["A", "The answer is B", "A or B", r"\boxed{C}"]),
        ("-x", ["\u2212x"], ["x"]),
        ("3 apples", ["3 apples"], ["13 apples"]),
        ("naïve", ["NAÏVE"], []),
        (r"\frac{a+b}{c}", ["(a+b)/c"], []),
        ("a+b/c", [], [r"\frac{a+b}{c}"]),
        ("(a+b)/c", [r"\frac{a+b}{c}"], []),
        ("a/bc", [], [r"\frac{a}{bc}"]),
        ("2x/3", [r"\frac{2x}{3}"], []),
        ("5!", ["5!", "**5!**."], ["5"]),
        ("5", ["5!"], []),
        ("A*", ["A*"], ["A"]),
        ("A", ["*A*"], []),
        ("(B)", ["B"], []),
        (".5 km", [".5 km."], ["5 km"]),
        ("(3,4)", ["(3,4)."], ["3,4"]),
        ("3,4", [], ["(3,4)"]),
        ("[1]", ["[1]"], ["(1)"]),
        ("(0,1]", ["(0,1]"], ["[0,1)"]),
        ("(a)(b)", [], ["a)(b"]),
        ("don't", ["don’t"], []),
        ("don’t", ["Don't."], []),
        ("Paris.", ["Paris"], []),
        ("**Paris**", ["Paris"], []),
        ("rock 'n'", ["rock 'n'"], []),
        ("[B]", ["B"], []),
        ("x = 3", ["X=3."], []),
        ("é", ["e\u0301"], ["e"])],
    "number": [
        ("-7", ["It is -7.", "\u20137"], ["It is 7.", "5\u20137"]),
        ("7", ["10 - 3 = 7"], ["x = \u22127", "It is minus 7.", "0 1 2 3 4 5 6 7", "\u22127",
         "5\u20137"]),
        ("12", ["12 km", "12km", "𝟏2", "1\u200b2", "so: 12", "１２"], ["X12", "12 km in 3 hours",
         "twelve", r"\frac12", "12:12"]),
        ("1234", ["1,234", "1{,}234"], ["1 234"]),
        ("234", [], ["1,234"]),
        ("12345", [], ["1,2345"]),
        ("3.5", ["3.50", "3{.}5"], []),
        ("3", ["3.0"], ["3.5", "0. 3", "It is 0. 3", r"\frac{\pi}{3}", r"{1 \over 3}",
         "It is 1 over 3", "x**3", r"\log_{3} x", r"\sqrt[3]{x}", "10^{- 3}", "x^{ 3}"]),
        ("5", ["Tom has 3 apples and buys 5.", "- 5", "So:\n- 5", "---\n5", "- - -\n5", "x:\n\n- 5",
         "room-5", "> - 5", "It is _5_ apples."], ["3.5", "3{.}5", r"\mathbf{0}.5", "50 cents",
         "The answer is - 5", "It equals \u2212 5.", "10 - 5", r"The answer is -\boxed{5}",
         r"It is -\$ 5", "It is -¥5", "It is -USD 5", "It is - $5", "The answer is —5",
         r"It fell -\,5 degrees", r"\frac{1}{2}-5", ".5", "minus 5", "negative 5", "-(5)", "-{5}",
         "{-}5", "x = - 5", "±5", "-+5", "2^(5)", "０．５", "5_000", "5x10⁴", "5²",
         r"\frac{1}{5}"]),
        ("0.5", [".5", r"\mathbf{0}.5", "０．５"], []),
        ("25", ["25%"], ["0.25"]),
        ("25%", ["25"], []),
        ("18", ["$18", "$18.00", "€18 in all"], ["$0.18"]),
        ("42", [r"Thus $\boxed{42}$.", "The total is**42**", "The total is **42**", "x_{1} = 42",
         "The answer is 42!", "6 x 7 = 42", "y = 42", "It went up from 41 to 42.",
         "We add 5 to 37 and get 42.", "It rose by 2 to 42.", "42 42", "6 * 7 = 42",
         "That makes 2 * 21 = 42.\n\n42", "**42**", "The answer:\n\n### 42", "1. 42", "Step 3: 42",
         "1. 40 and 2 more\n2. 40 + 2 = 42", "6 * 7\n#### 42", "3) 42", "He has 40.\n\\boxed{42}",
         "４２", "<think>41</think>42", "the total—42 apples", "Total - 42", "It is USD 42",
         "47-5 is 42", "84/2 = 42", "84÷2 = 42", "42 m", "He has 42 apples.", "42 km/h", r"42\%",
         "42 USD", "6 * 7 = 42\n#### 42"], [r"\sqrt{42}", r"The answer is \sqrt 42", "√42",
         "sqrt(42)", r"42\pi", r"42\sqrt{2}", "42π", "$42!$", "42x", "42 + x", "x + 42", "x - 42",
         r"\log 42", r"\sin(42)", "41 or 42", "maybe 41, perhaps 42", "41 vs 42", "41 to 42",
         "41 versus 42", "41, or rather 42", "41. 42", "It is 41. 42", "$41$ $42$", "`41` `42`",
         r"\(41\) or \(42\)", r"41 \text{ or } 42", r"\boxed{41} or \boxed{42}", r"41\quad 42",
         "41? 42", "41 — 42", "The ratio is 41 : 42", "40 41 42", "It is 42. Or is it 41?", "",
         "I do not know.", "| 41 | 42 |", "٤٢", "<think>So it is 42",
         "<think>42</think>I cannot say.", "42" * 30, "It is 42/42", "42k", "$42K", "41 or 42 42",
         "41 or 42 or 42", "40 41 42 42", "41，42", "41、42", "41·42"]),
        ("2", [], [r"\frac{1}{2}", "x^2", "H<sub>2</sub>O", "1/2", "1½", r"\frac{\text{total}}{2}",
         "x/(2)", "1.1.2", "version 2.5.1", "2^{1/2}", "2^n", "2^{n}", "१2", "١2", "①2", "2½",
         "1\u200b2", "1\u00ad2", "1\ufeff2", "1⁄2", "1∕2", "1÷2", r"\cfrac{1}{2}"]),
        ("30000", [r"3 \times 10^{4}", "3 x 10^4"], []),
        ("8", [], ["Tom has 3 apples and buys 5."]),
        ("30", [], ["12:30"]),
        ("0", [], ["10^-99999999", "1'000"]),
        ("0.25", [], ["25%"]),
        ("1234567", ["1{,}234{,}567", r"1,\!234,\!567", "12,34,567"], []),
        ("-5", ["The answer is - 5", "It equals \u2212 5.", r"The answer is $-\boxed{5}$",
         r"It is -\$ 5", "It is -₹5", "It is -USD 5", "is -**5**", "-$5$", "It fell -**5** degrees",
         "It is at {-}5", r"is \text{-}5", "is &minus;5", "minus 5", "-(5)", "x = - 5"], ["--5"]),
        ("24", [r"\frac{48}{2} = 24"], []),
        ("15", ["$15/hour"], []),
        ("9000", ["It is over 9000"], []),
        ("4", [r"\sqrt{16} = 4"], ["10<sup>4</sup>", "10^4"]),
        ("120", ["$5! = 120$"], []),
        ("21", ["2x = 42, so x = 21"], []),
        ("567", [], ["1.234.567", r"1,\!234,\!567", "12,34,567"]),
        ("43", [], ["1. 42\n2. 43"]),
        ("1", ["He grows 12.\n\n**1**"], ["1e99999999999999999999"]),
        ("10", ["10 digits of pi.\n\\boxed{10}"], ["3 × 10⁴", "2^10"]),
        ("-6", ["_-6_"], []),
        ("6", [], ["_-6_"]),
        ("234567", [], [r"1,\!234,\!567"]),
        ("58500.25", [r"58,\!500.25"], []),
        ("100000", ["1,00,000"], []),
        ("500", [], ["0,500", "9{,}500", "9，500", "9&nbsp;500", r"9\thinspace 500", r"9{\,}500",
         "9·500", "9~500"]),
        ("56", [], ["1.234,56"]),
        ("100", ["100 100"], []),
        ("90", [r"90^\circ", r"90^{\circ}"], []),
        ("10000", ["10<sup>4</sup>"], []),
        (".5", [".5", "0.5", "It is .50."], ["5", "-.5"]),
        ("-.5", ["\u2212.5"], [".5"]),
        ("9500", ["9{,}500", r"$9\,500$", "９，５００"], ["9 500"]),
        ("9{,}500", ["9,500"], ["500"]),
        (r"\$9{,}500", ["$9500"], []),
        ("\u22127", ["-7"], []),
        ("0.00001", ["1e-05"], []),
        ("1e-05", ["0.00001", "1e-5"], ["1", "5", "-0.00001"]),
        ("1.2E3", ["1200"], ["1.2"]),
        ("3 x 10^4", ["30,000"], ["4"]),
        (r"3 \times 10^{4}", ["3e4"], []),
        ("50%", ["50", r"50\%"], ["0.5"]),
        ("5.", ["5"], []),
        ("5 €", ["5"], []),
        ("+5", ["5"], ["-5"]),
        ("20", ["40-20=20\n#### 20"], []),
        ("32", ["2^(5)"], []),
        ("0.001", ["10^{- 3}"], []),
        ("5000", ["5_000"], []),
        ("50000", ["5x10⁴"], []),
        ("9", [], ["9^9999999"])],
    "boxed": [
        ("42", [r"\boxed{42}", r"So $x = \boxed{42}$.", r"$$\boxed{x = 42}$$", r"\boxed{ 42 }",
         r"\boxed{\text{42}}", r"\boxed{\mathbf{42}}", r"\boxed{\boxed{42}}", r"\[ \boxed{42} \]",
         r"\boxed{\displaystyle 42}", r"\boxed{42.}", r"\boxed {42}", r"\boxed{n = 42}",
         r"\boxed{\text{The answer is } 42}", r"\text{The answer is \boxed{42}}",
         r"\textbf{\boxed{42}}", r"{\boxed{42}}", r"x \approx \boxed{42}",
         r"6 \times 7 = \boxed{42}", r"\implies\boxed{42}",
         r"\begin{aligned} x &= 6 \cdot 7 \\ &= \boxed{42} \end{aligned}", r"\boxed{+42}",
         r"\boxed{41}. No, I forgot one: \boxed{42}", r"\boxed{42}, that is \boxed{42}",
         "\\boxed{42}\n\n\\boxed{42}", r"\fbox{42}", r"**\boxed{42}**",
         "### Problem #2\n\n\\boxed{42}", "Done.\\boxed{42}.\n1. First", r"\boxed{**42**}",
         r"**Answer:** \boxed{42}", r"**Answer**\boxed{42}", r"*Answer* \boxed{42}",
         r"The answer is:\boxed{42} apples.", r"\boxed{42} - a good number of apples",
         r"\boxed{42}*", r"Thus she has $\boxed{42}$, as 6 * 7 = 42.", r"is\boxed{42}",
         "\\boxed{42}\n\n2. Check", "\\boxed{4\u200b2}", r"<think>\boxed{41}</think>\boxed{42}",
         r"\boxed{42^1}", r"\boxed{42\boxed{}}", r"\boxed{42}}", r"\boxed{{42}}", r"\boxed{42}\%",
         r"\boxed{42}!", r"\boxed{42\text{ apples}}", r"\boxed{42\text{ pizza pieces}}",
         r"\boxed{42 apples}", r"\boxed{42\text{ square feet}}", r"\boxed{42\text{ m}}",
         r"\boxed{42\,\text{g}}", r"\boxed{42\text{ miles per hour}}", r"\boxed{42\text{ km/h}}",
         r"\boxed{42\text{ m/s}^2}", r"\boxed{42~\text{km}}", r"\boxed{42^\circ\text{C}}",
         r"\boxed{42^{\circ} \mathrm{F}}", r"\boxed{42\text{ percent}}",
         r"\boxed{42\text{ Dollars}}", r"\boxed{42\mathrm{~cm}}", r"\boxed{42 USD}",
         r"\boxed{42\text{ sq. ft.}}", r"\boxed{42\text{ years old}}",
         r"\boxed{\$42 \text{ per day}}"], [r"\boxed{42x}", r"\boxed{\sqrt{42}}", r"\boxed{x + 42}",
         r"\boxed{42!}", r"\boxed{-(-42)}", r"\boxed{42\pi}", r"\boxed{x > 42}",
         r"\boxed{42 \text{ or } 41}", r"\boxed{42 \cdot 1}", r"\boxed{42_{10}}", r"\boxed{|42|}",
         r"\boxed{42 + C}", r"\boxed{\approx 42}", r"\boxed{42...}", r"\boxed{41 = 42}",
         r"\boxed{-42}", r"-\boxed{42}", r"\boxed{\pm 42}", r"\boxed{--42}", "\u2212\\boxed{42}",
         r"- \boxed{42}", r"-$\boxed{42}$", r"-(\boxed{42})", r"-\(\boxed{42}\)",
         r"minus \boxed{42}", r"10^{\boxed{42}}", r"\boxed{41 or 42}", r"\boxed{41} or \boxed{42}",
         r"\boxed{41, 42}", r"\boxed{42}, \boxed{41}", r"\boxed{41}\boxed{42}\boxed{42}",
         r"$\boxed{41}$ or $\boxed{42}$", r"\boxed{41}. \boxed{42}", r"\boxed{41} \quad \boxed{42}",
         r"\boxed{41} \text{ or } \boxed{42}", r"\(\boxed{41}\), \(\boxed{42}\)",
         r"\boxed{41} or rather \boxed{42}", r"\boxed{41} vs. \boxed{42}",
         "\\boxed{41}.\n\n\\boxed{42}", r"\boxed{42}. No, I forgot one: \boxed{43}",
         r"\boxed{42 \boxed{41}}", r"\boxed{41} \boxed{42}", "\\boxed{41}\n\n\\boxed{42}", "42",
         r"\boxed{}", r"42 \boxed{}", r"\boxed{42", r"\boxed{41} and \boxed{42", "boxed{42}",
         r"\boxed{}\boxed{42}", r"\boxed 42", r"\boxedx{42}", r"0.\boxed{42}",
         r"<think>\boxed{42}</think>It is 42.", r"<think>\boxed{42}",
         r"I put the answer in \boxed{}: 42", r"\boxed{4}2", r"\boxed{0 1 2 3 42}",
         r"\boxed{42}{41}", r"\boxed{}42\boxed{}", r"2\boxed{42}", r"\boxed{42}\times 10",
         r"2*\boxed{42}", r"2 * \boxed{42}", r"2x\boxed{42}", r"3 × \boxed{42}", r"\boxed{42}x",
         r"\sqrt{\boxed{42}}", r"\frac{\boxed{42}}{2}", r"\frac{1}{\boxed{42}}", r"\sqrt\boxed{42}",
         r"\boxed{42} thousand", r"$\boxed{42}$ Million", r"\boxed{42},000", r"\boxed{42}\,000",
         r"\boxed{42} + 1", r"\boxed{42} \cdot 3", r"$\boxed{42}$ + x", r"\boxed{42} - 1",
         r"\boxed{42}\pi", r"\boxed{42}\sqrt{2}", r"\boxed{42}\text{ million}", r"\boxed{42}$^2$",
         r"2(\boxed{42})", r"\boxed{42 Million}", r"\boxed{42 MILLION}", r"\boxed{42 millions}",
         r"\boxed{42\text{ Millions}}", r"\boxed{42 thousands}", r"\boxed{42 trillion}",
         r"\boxed{42 lakh}", r"\boxed{42 crore}", r"\boxed{42 bn}", r"\boxed{42\text{ halves}}",
         r"\boxed{42\text{ tenths}}", r"\boxed{42 pi}", r"\boxed{42 plus}", r"\boxed{42 minus}",
         r"\boxed{42\text{ times}}", r"\boxed{42 wrong}", r"\boxed{42\text{ is wrong}}",
         r"\boxed{42\text{k}}", r"\boxed{42\text{!}}", r"\boxed{42\text{ + C}}",
         r"\boxed{42\mathrm{i}}", r"\boxed{42\text{}^2}",
         r"\boxed{42\text{ thousand} \text{ dollars}}", r"\boxed{42\text{ below zero}}",
         r"\boxed{42\text{x}}", r"\boxed{42\text{M}}", r"\boxed{42 K}", r"\boxed{42\text{ not}}",
         r"\boxed{42\,\text{Billion}}", r"\boxed{42 \text{ millionths}}",
         r"\boxed{42 \text{ tens}}"]),
        ("x+1", [r"\boxed{x + 1}", r"\fbox{$x+1$}"], [r"\boxed{x - 1}"]),
        (r"10\sqrt{2}", [r"\boxed{10\sqrt{2}}"], [r"\boxed{10\sqrt{3}}"]),
        ("(1, 2)", [r"\boxed{(1,2)}", r"\boxed{\left(1,\, 2\right)}"], [r"\boxed{(2,1)}"]),
        ("(0,1]", [r"\boxed{(0,1]}"], [r"\boxed{[0,1)}"]),
        (r"\frac{1}{2}", [r"\boxed{\dfrac{1}{2}}", r"\boxed{\frac 12}"], []),
        ("1/2", [r"\boxed{\frac{1}{2}}"], [r"\boxed{\frac{1}{3}}"]),
        ("2", [], [r"\boxed{\frac{1}{2}}", r"1/\boxed{2}"]),
        (r"\frac{x}{2}", [r"\boxed{\frac{x}{2}}"], []),
        ("-42", [r"\boxed{-42}", r"\boxed{- 42}", "\\boxed{\u221242}"], []),
        ("1234", [r"\boxed{1{,}234}", r"\boxed{1,234}"], []),
        ("234", [], [r"\boxed{1,234}"]),
        ("3.5", [r"\boxed{3.50}"], []),
        ("3", [], [r"\boxed{3.5}"]),
        ("25", [r"\boxed{25\%}"], []),
        ("18", [r"\boxed{\$18}", r"\boxed{18 \text{ dollars}}", r"\boxed{18\$}",
         r"\boxed{18 dollars}"], [r"\boxed{\$18.50}", r"\boxed{18 \text{ million}}",
         r"\boxed{18 thousand dollars}", r"\boxed{18 \text{ dollars and 50 cents}}",
         r"\boxed{18 \times 10^{3}}"]),
        ("12", [r"\boxed{12 \text{ km}}", r"\boxed{12\,\mathrm{km}}", r"\boxed{12\text{km}}",
         r"\boxed{12\ \text{cm}^2}", r"\boxed{12 \text{ cm}^{2}}", r"\boxed{12 \%}"],
         [r"\boxed{12 \text{ of } 13}", r"\boxed{12^2}", r"\boxed{12k}",
         r"\boxed{12 \text{ dozen}}", r"\boxed{12 squared}", r"\boxed{12 \text{ squared}}",
         r"\boxed{12 or more}", r"\boxed{12 \text{ or more}}", r"\boxed{12 to the third}",
         r"\boxed{12 factorial}", r"\boxed{12 \text{ times } x}", r"\boxed{not 12}",
         r"\boxed{\text{not } 12}"]),
        ("90", [r"\boxed{90^\circ}", r"\boxed{90^{\circ}}"], []),
        ("Paris", [r"\boxed{\text{Paris}}", r"\boxed{\textbf{paris}}"], [r"\boxed{Rome}",
         r"\boxed{Paris, France}", r"\boxed{\text{}}"]),
        ("B", [r"\boxed{\text{(B)}}", r"\boxed{B}"], [r"\boxed{AB}", r"\boxed{B, C}",
         r"A\boxed{B}"]),
        ("41", [], [r"\boxed{42 \boxed{41}}"]),
        ("4", [], [r"\boxed{4}2"]),
        ("x", [r"\boxed{X}", r"\boxed x"], [r"\boxed{y}"]),
        ("x^2", [r"\boxed{x^{2}}"], []),
        ("x^{12}", [r"\boxed{x^12}"], []),
        (r"\pi", [r"\boxed{\pi}"], [r"\boxed{2\pi}"]),
        (r"\sqrt{2}", [r"\boxed{\sqrt2}"], []),
        (r"\frac{\pi}{2}", [r"\boxed{\dfrac{\pi}{2}}"], []),
        (r"\frac{\sqrt{3}}{2}", [r"\boxed{\frac{\sqrt{3}}{2}}", r"\boxed{\dfrac{\sqrt{3}}{2}}"],
         [r"\boxed{\frac{\sqrt{2}}{3}}"]),
        ("[1,2)", [r"\boxed{\left[1, 2\right)}"], [r"\boxed{(1,2)}"]),
        ("(1,2)", [], [r"\boxed{[1,2]}", r"\boxed{1,2}"]),
        ("1,2", [], [r"\boxed{(1,2)}"]),
        ("f(x)", [r"\boxed{f(x)}"], []),
        ("f(x", [], [r"\boxed{f(x)}"]),
        (r"\frac{3}{4}", [r"\boxed{3/4}"], []),
        (r"\frac34", [r"\boxed{\frac{3}{4}}"], []),
        ("0.5", [], [r"\boxed{1/2}"]),
        ("1", [], [r"\boxed{1\frac{1}{2}}"]),
        ("-1/2", [r"\boxed{-\frac{1}{2}}"], [r"\boxed{\frac{1}{2}}"]),
        ("18000", [r"\boxed{18 \times 10^{3}}"], []),
        ("3,5", [r"\boxed{3, 5}"], [r"\boxed{5, 3}", r"\boxed{3}, \boxed{5}"]),
        ("no one", [r"\boxed{\text{no one}}"], []),
        ("no", [], [r"\boxed{\text{no one}}"]),
        ("Tuesday", [r"\boxed{\mbox{Tuesday}}"], []),
        (r"\frac{1}{x+1}", [r"\boxed{1/(x+1)}", r"\boxed{\dfrac{1}{x+1}}"],
         [r"\boxed{\frac{1}{x}+1}", r"\boxed{1/x+1}"]),
        (r"\frac{a+b}{c}", [r"\boxed{(a+b)/c}"], [r"\boxed{a+\frac{b}{c}}"]),
        (r"\frac{x}{2y}", [r"\boxed{\tfrac{x}{2y}}"], [r"\boxed{\frac{x}{2}y}"]),
        (r"\frac{1}{2\pi}", [], [r"\boxed{\frac{1}{2}\pi}"]),
        (r"\frac{2\pi}{3}", [r"\boxed{2\pi/3}"], []),
        (r"\frac{1}{x^2}", [], [r"\boxed{\frac{1}{x}^2}"]),
        ("1/23", [], [r"\boxed{\frac{1}{2}3}"]),
        ("11/2", [], [r"\boxed{1\frac{1}{2}}"]),
        (r"1\frac{1}{2}", [r"\boxed{1\frac12}"], []),
        (r"\frac{x^2}{2}", [r"\boxed{x^2/2}"], []),
        ("2*3", [r"\boxed{2*3}"], [r"\boxed{23}"]),
        ("A*", [], [r"\boxed{A}"]),
        ("23", [], [r"\boxed{2*3}"]),
        (r"\frac{ab}{c}", [r"\boxed{a\frac{b}{c}}"], []),
        (r"2\frac{1}{2}", [], [r"\boxed{\frac{21}{2}}"]),
        (r"\frac{\frac{1}{2}}{3}", [], [r"\boxed{\frac{1}{\frac{2}{3}}}"]),
        (".5", [r"\boxed{0.5}"], []),
        ("5", [], [r"is .\boxed{5}", r"\boxed{. 5}", r"\boxed{...5}", r"\boxed{5-}",
         r"\boxed{±5}"]),
        ("1234567", [r"\boxed{12,34,567}"], []),
        ("500", [], [r"\boxed{0,500}"]),
        (r"(58,\,500)", [r"\boxed{(58,500)}"], []),
        ("a", [], [r"I put it in \boxed and"]),
        (r"2\sqrt{3}", [r"\boxed{2\sqrt 3}"], []),
        (r"\frac{1}{72}", [r"\boxed{\frac1{72}}"], [])],
    "contains": [
        ("Paris", ["It is Paris, of course.", "PARIS", "Paris's river", "Is it Paris?",
         "Paris, Texas", '"Paris"', "'Paris'", "(Paris)", r"\text{Paris}", "It is **Paris**.",
         "It is _Paris_.", "Pa\u200bris", "<think>Rome</think>It is Paris."], ["a Parisian", "Rome",
         "comparison", "Paris-based", "", "<think>Paris</think>It is Rome.", "<think>It is Paris",
         "P a r i s"]),
        ("mail", [], ["an e-mail"]),
        ("can", [], ["I can't say."]),
        ("art", ["It is art."], ["state-of-the-art", "start"]),
        ("New York", ["It is in new\nyork.", "**New** York"], ["New Yorkers", "York is not new.",
         "New, York"]),
        ("well-known", ["a well-known man"], []),
        ("C++", ["written in C++."], []),
        ("C", [], ["written in C++", "written in C#"]),
        ("U.S.", ["in the U.S. since"], []),
        ("x", ["x = 3"], ["max", "x_1", r"\max"]),
        ("-7", ["It fell to -7 degrees."], ["5-7"]),
        ("7", ["5-7"], ["It fell to -7 degrees.", "\u22127"]),
        ("12", ["12km"], ["room X12"]),
        ("12 km", ["about 12 km away", "within 12 km."], ["112 km", "1.12 km", "3,12 km", "-12 km",
         "12 kmh", "12 km/h", "12km", "12 km^2", "12 km²"]),
        ("1234", ["1,234 men"], []),
        ("234", [], ["1,234 men"]),
        ("1", [], ["1,234 men"]),
        ("3.5", ["3.50 m"], []),
        ("3", [], ["3.5 m"]),
        ("5", [], ["3.5 m", "55%"]),
        ("section 3", ["in section 3."], ["in section 3.5 of it"]),
        ("25%", ["25 % of them"], []),
        ("25", [], ["0.25"]),
        ("18", ["It costs $18.00."], ["$1,018"]),
        ("$18", [], ["It costs $0.18."]),
        ("42", [r"$\boxed{42}$", "6 * 7 = 42, which is less than 43", "４２"], [r"\sqrt{42}",
         "2042 or 421", "forty-two", "4 2", "4242", "It is 42/43"]),
        ("2", [], ["x^2"]),
        ("1/2", ["It is 1/2 of it.", r"\frac{1}{2}"], ["It is 11/2 of it.", "It is 1/20 of it.",
         "1/2/3", "3 1/2"]),
        ("café", ["the cafe\u0301"], ["the cafe"]),
        ("cafe", [], ["the cafe\u0301"]),
        ("2024-05-01", ["on 2024-05-01."], ["2024-05-012"]),
        ("10.0.0.1", ["at 10.0.0.1:80"], ["10.0.0.12", "110.0.0.1"]),
        ("O'Brien", ["It was O’Brien."], ["Brien"]),
        ("Brien", [], ["It was O'Brien."]),
        ("rock 'n' roll", ["some rock 'n' roll"], []),
        ("the", [], ["other"]),
        ("key_7", ["the key_7 is"], []),
        ("key", [], ["the key_7 is"]),
        ("a.b", [], ["axb"]),
        ("...", [], ["..."]),
        ("?", [], ["what?"]),
        ("Rome", [], ["RomeRome"]),
        ("5 m", [], ["5 mm"]),
        ("3.5 m", ["3.5 m."], ["13.5 m"]),
        ("1,000 men", [], ["11,000 men"]),
        ("000", [], ["1,000"]),
        ("x^2", ["so x^2 it is"], ["x^{23}"]),
        ("alpha", [r"\alpha"], []),
        ("東京", ["「東京」"], ["東京です"]),
        ("4817", [], ["48174817"]),
        ("ab12", [], ["ab123", "xab12"]),
        ("e", [], ["abcdefgh"]),
        ("2 + 2", [], ["12 + 2", "2 + 22"]),
        ("5 km", ["- 5 km", "is ...5 km"], ["\u2212 5 km", "It fell by \u22125 km", "→ - 5 km",
         r"\approx-5 km", ".5 km"]),
        ("3 1/2", ["It is 3 1/2."], []),
        ("2.5", ["It is 2.5."], ["2.5.1"]),
        ("US", ["in the US"], ["Tell us."]),
        ("A", ["vitamin A"], ["a dog"]),
        ("no", ["No."], []),
        ("5!", ["It is 5!"], ["It is 5"]),
        ("don’t", ["I don't."], []),
        ("IT", [], ["it is"]),
        ("A*", ["grade A*"], ["grade A"]),
        ("58,500 men", [r"58,\!500 men"], []),
        ("500 men", [], [r"58,\!500 men", "58'500 men"]),
        ("234 men", [], ["1 234 men"]),
        ("34", [], ["12,34,567 men"])]}
# of the rule `choice`: the letter that the responses choose, None where it is no single one
CHOICES = {
    "A": ["A", "The answer is A.", "Answer: a", "Answer: a)", "The answer is (a).",
        "The answer is a", "It is A.", "a)"],
    "B": ["B", "b", "(B)", "B.", "[B]", "B) Paris", "B. Paris", "(b) Paris", "B: Paris",
        "Answer: b", "Answer:B", "ANSWER = B", "The answer is (B).",
        "The answer is B because Paris lies in France.", "The correct answer is B) Paris.",
        "The correct option is B.", "Final answer: Option B", "Option B", "Option (B) is correct.",
        "I would go with B.", "I choose B", "So it must be B.", "Paris lies in France.\n\nB",
        "Paris lies in France.\nAnswer: B", "The answer is: B", "Answer: (B) Paris",
        "The final answer is (B)", "Therefore, the best answer is choice B.", "My choice: B",
        "The right choice is: (b)", "B is the correct answer.", "B is correct.", "I think it's B.",
        "It is B!", "B, because Paris lies in France.", "B - Paris", "B\n\nParis lies in France.",
        "Answer B", "The answer's B.", "Ans: B", "The answer is option (B): Paris.",
        "the answer is b", "Answer:\nB", "Answer:\n\n(B)", "B.Paris", "Answer: B.Paris", "So, B",
        "Thus B.", "Therefore, (B).", "Paris lies in France.\nHence: B", r"\boxed{B}",
        r"The answer is $\boxed{\text{B}}$.", r"\boxed{\textbf{(B)}\ 12}",
        r"The answer is $\mathbf{B}$.", r"\(\boxed{B}\)", "$B$", "**B**", "**Answer:** B",
        "The answer is **B**.", "### Answer\n\n**(B)** Paris", "**Answer: B**",
        "**Correct answer:** **B) Paris**", "> B", "The correct answer is:\n\n**B. Paris**",
        "<answer>B</answer>", "<answer> (B) </answer>", "The answer is B, not C.",
        "No doubt the answer is B.", "The answer is B because Paris is not in Italy.",
        "The answer is B, which is not hard.", "The answer is A. No, the answer is B.",
        "The answer is B. A is wrong.", "B. Answer: B",
        "The answer is A. Wait, I misread it. The answer is B.",
        "(A) is too small, so the answer is (B).", "The answer is (B), since (C) is too large.",
        "Ｂ", "（B）", "B\u200b", "Answer：B", "“B”", "答案是B", "The answer is 'B'.",
        "The answer is ‘B’.", "<think>A or B?</think>B",
        "A) Rome\nB) Paris\nC) Bonn\nThe answer is B."],
    "C": ["C", "The answer is (C).", "- **C**", "I think the answer is C.",
        "B is not the right answer. The answer is C.", "B is correct. No, wait, C is correct.",
        "<think>The answer is B.</think>C", "- A is wrong\n- B is wrong\n- C is right",
        "B) nein\nAntwort: C", "(B) no\nAns C"],
    "E": ["Answer: e"],
    "I": ["Answer: I"],
    "J": ["The answer is J."],
    None: [r"\boxed{AB}", "A. No\nB. Yes\nC. No", "A dog is an animal.", "The answer is a dog.",
        "Answer: a dog", "Answer: A dog that barks.", "Answer: A+", "Answer: A.M.", "A man walks.",
        "A, an and the are articles.", "The answer is a, b and c.", "What is the answer? A man.",
        "It's a trap.", "I pick a card.", "The answer is\na man", "A = 5", "Answer: A = 5",
        "Answer: I think so.", "I'm not sure.", "Answer: I, Claudius", "i = 3",
        "Both are possible.", "But why?", "We need a plan B for this.", "Answer: B-cells", "B2B",
        "Answer: B^2", "Answer: B|C", "Answer: B.Sc", "'B' is a letter.", "The answer is Carbon.",
        "Answer: C++", "The answer is carbon (C14).", "20 °C", "It is 20 C.",
        "He lacks vitamin D, as many do.", "Answer: D'Artagnan", "The answer is vitamin D.",
        "D-Day", "Answer: E=mc^2", "e.g. this one", "The answer is not B.", "B is incorrect.",
        "Option B is not correct.", "The answer is definitely not B", "It isn't B.",
        "Answer: not B", "I would never choose B.", "I do not think the answer is B.",
        "B is correct? No.", "It can't be B.", "The wrong answer is B.", "Not (B)",
        "Option B is the best of the wrong ones", "Anything but B", "Answer: B is not right",
        "The answer is B is false.", "Answer: B isn't right", "The worst choice is B",
        "Eliminated choice: B", "I doubt the answer is B.", "Nobody says it is B",
        "No one thinks it is B", "It cannot be that the answer is B", "The answer is B. No, C",
        "The answer is B. Wait, C.", "The least likely answer is B", "A or B",
        "The answer is A or B.", "The answer is B (or C).", "Either (A) or (B)",
        "The answer is either A or B.", "Maybe B, maybe C.", "Answer: B) Paris or C) Rome",
        "B or C", "Answer: B/C", "Answer: B, C", "Answer: B; or else C",
        "The answer is B or possibly C.", "It could be B or it could be C.",
        "Answer: B (Paris) or C (Rome)", "Both B and C are correct.", "B and C is correct",
        "One of A, B, C", "If x then B, else C.", "The answer is B. Or C.",
        "The answer is B, but it could be C.", "So, B or C", "Answer: B vs C",
        "Answer: B or rather C", "Answer: B, actually C", "A, B", "B, C", "A/B", "A B C D",
        "(A)(B)", "ABCD", "B\nC", "Answer: B and C", "Answer: B\nC", "All of the above", "(B)\n(C)",
        "B) Paris\nC) Rome", "B. C.", "B, C, D", "A. B. C. D.", "B is correct. C is correct.",
        "The answer is B\nThe answer is C", "A-B-C-D", "A|B|C|D", "A+B", "A=B", "(A, B)", "[A][B]",
        "{A,B}", r"\boxed{A}\boxed{B}", r"\boxed{A, B}",
        "The answer is B. The answer is C. The answer is D.", "Answer: B\nAnswer: C", "B\n\nC", "",
        "I do not know.", "Answer:", "The answer is 2.", "The answer is Paris.",
        "None of the above.", "()", "Answer: none", "ß", "<think>B", "A) Rome\nB) Paris\nC) Bonn",
        "Which is right?\nA) x\nB) y\nAnswer:", "Which? (A) x (B) y (C) z",
        'Finish with "The answer is X", where X is A, B, C or D.', "Answer with A, B, C or D.",
        "The answer is A, B, C or D.", "The answer is (A) (B) (C) (D).", "B? C? D?",
        "Answer: A, Answer: B, Answer: C", "b c d", "AaBbCc", "a b",
        "Answer: A. Answer: B. Answer: C.", "A is correct, B is correct, C is correct",
        "Answer: B C D", "A\tB\tC", "1. A\n2. B\n3. C", "The answer is J. K. Rowling.",
        "J.R.R. Tolkien", "5G", "The answer is F(x) = 2.", "f(x) = 2", "H2O", "Antwort: nicht B",
        "Die Antwort ist nicht B.", "B ist falsch.", "Antwort: Berlin", "Antwort: B ist falsch",
        "Die falsche Antwort ist B", "Antwort: B oder C", "Antwort: B-Vitamine",
        "La réponse n'est pas B.", "Réponse : B est faux", "La mauvaise réponse est B",
        "Réponse : B ou C", "La respuesta no es B.", "Respuesta: B es falsa", "Respuesta: B y C",
        "La risposta non è B", "Resposta: B e C", "答案不是B", "答案是B不对", "错误答案是B",
        "答案是 B 或 C", "答案是B类", "维生素B", "Ответ: B или C", "Vitamin: B",
        "B would be correct if x.", "B is correlated with x.", "B) ei\nVastaus: C",
        "B: nem\nVálasz: C", "B. όχι\n\nΑπάντηση: C"]}
TABLE = {rule: [(gold, text, right) for gold, *texts in cases
                for right, column in zip((1, 0), texts) for text in column]
         for rule, cases in CASES.items()}
TABLE["boxed"] += [(gold, rf"\boxed{{{found}}}", right) for found, whole, part in (
      (".5", "5", "0.5"), (r"\$.50", "50", "0.5"), (".05", "5", "0.05"), (".5%", "5", "0.5"),
      ("-.5", "5", "-0.5"), ("x = .5", "5", "0.5"), ("$.5$", "5", "0.5"),
      ("(.5)", "5", ".5"),
      (r".5 \text{ km}", "5", ".5"), (r"-\$.50", "50", "-.5"), (r"\text{.5}", "5", "0.5"),
      (r"\text{Answer: }.5", "5", ".5"), (r"\displaystyle.5", "5", ".5"), ("{.5}", "5", ".5"))
    for gold, right in ((whole, 0), (part, 1))]
TABLE["boxed"] += [(gold, rf"\boxed{{{found}}}", right) for found in (
      " - 5", "- 5", r"-\,5", r"\text{-}5", r"-\text{5}", "$- 5$", "\n- 5\n", "( - 5 )",
      "{-}5", "minus 5", r"\text{negative 5}", "x = - 5", r"-\$5", r"\text{Answer: } - 5",
      r"-5^\circ") for gold, right in (("-5", 1), ("5", 0))]
TABLE["boxed"] += [(gold, text, right) for text in (
      r"\boxed{90}^\circ", r"$\boxed{90}^{\circ}$", r"\boxed{90}°", r"\boxed{90°}",
      r"\boxed{90\degree}", r"\boxed{90°C}", r"\boxed{90 ^\circ}", r"\boxed{x = 90^\circ}",
      r"\boxed{\angle ABC = 90^\circ}")
    for gold, right in (("90", 1), (r"90^\circ", 1), ("9", 0), ("91", 0))]
TABLE["boxed"] += [("90", text, 0) for text in (
      r"\boxed{90}^2", r"\boxed{90}^{\circ}+1", r"\boxed{90°30'}", r"2\boxed{90}^\circ",
      r"\boxed{90°\cdot 2}", r"\boxed{90°} or \boxed{91°}")]
TABLE["boxed"] += [(gold, rf"\boxed{{{found}}}", right) for found in (
      r"\text{12 dollars}", r"\text{\$12}", r"\mathrm{12\ cm}", r"12\ \mathrm{m/s^2}",
      r"12\,\mathrm{cm}^{3}", r"12\ \text{cm}²", r"12\,\mathrm{kg}\cdot\mathrm{m}^2",
      "12 km^2", r"12\,\mathrm{s}^{-1}", r"12\hspace{2mm}\text{km}", "€ 12", "12€",
      r"\text{12 km/h}.", r"\text{Answer: }12", r"\text{Answer: 12}", r"\text{Total} = 12",
      "x_1 = 12", "f(2) = 12", r"\theta = 12", r"\text{The final answer is: } 12",
      r"\text{Area} = 12\text{ cm}^2", r"\left(12\right)", r"\textcolor{red}{12}",
      r"{\bf 12}", r"\Large 12", r"\underline{12}", r"12\text{.}", "~12")
    for gold, right in (("12", 1), ("2", 0))]
TABLE["boxed"] += [("12", rf"\boxed{{{found}}}", 0) for found in (
      r"\text{12 million dollars}", r"\text{12 or 13}", r"\text{not 12}", r"\text{about }12",
      r"\text{Not the answer: }12", r"\text{Wrong: }12", "11 = 12", "2x = 12", "x^2 = 12",
      r"\log x = 12", r"\text{half is }12", r"\text{minus: }12", r"\text{Answer: }12x",
      r"\text{Answers: }11, 12", r"\text{11 is }12", r"\sqrt{x} = 12", "less than: 12",
      "12 m^2 million", "12 xy", "12 ab", r"12\,\mathrm{m} \cdot 2", "(12, 13)", "(1)2",
      "[12]")]
TABLE["boxed"] += [(gold, text, right) for text in (
      r"\fbox{4}", r"\framebox{4}", r"\boxed 4", r"\boxed4", r"So $\boxed 4$.", r"\fbox{$4$}",
      r"\textcolor{red}{\boxed{4}}", r"{\Large \boxed{4}}")
    for gold, right in (("4", 1), ("5", 0))]
TABLE["boxed"] += [("4", text, 0) for text in (
      r"\boxed 42", r"\boxed 4x", r"\boxed 4.5", r"-\boxed 4", r"\boxed 4, \boxed 5",
      r"-\fbox{4}", r"\fbox{3} or \fbox{4}", r"\fboxsep{4}", r"\mbox{4}", r"\fbox{4",
      r"\boxed{4} \fbox{5}")]
# what `boxed` pays too, and what only math-verify can tell: gold, boxes that are right, wrong
MATH = [
    ("42", ["42", r"42 \text{ km}", r"6 \cdot 7", "-(-42)"], ["43", "-42",
     r"42 \text{ million}", r"42\text{k}", r"\approx 42", "42...",
     r"42 \text{ or more}", "42, 43", r"42 \text{ or } 43", r"\pm 42", "x > 42", ""]),
    ("500", [], [r"58\,500", "58 500"]),
    ("1/2", ["0.5"], ["0.51", "2"]),
    (r"\frac{1}{2}", [r"\frac{2}{4}"], []),
    ("0.5", [r"\frac12"], []),
    ("0.33", [], [r"\frac13"]),
    (r"3\frac{1}{2}", ["3.5"], []),
    ("x+1", ["1+x"], ["x-1", "y+1"]),
    ("(x+1)^2", ["x^2+2x+1"], []),
    (r"2\sqrt{2}", [r"\sqrt{8}"], [r"\sqrt{6}"]),
    ("3xy", ["3yx"], []),
    (r"\frac{3\pi}{2}", [r"\frac{3}{2}\pi"], [r"\frac{3}{2\pi}"]),
    ("x/2", [r"\frac{1}{2}x"], [r"\frac{1}{2x}"]),
    ("2^{10}", ["1024"], []),
    ("3,5", [r"\{5, 3\}", r"5\text{ and }3"], ["3,5,7"]),
    ("(3,5)", [], ["(5,3)"]),
    ("[1,2)", ["[1, 2)"], ["(1,2)"]),
    ("x=3", ["3"], []),
    ("Paris", [r"\text{Paris}"], ["Parsi"]),
    ("even", [], ["neve"]),
    ("no", [], ["on"]),
    ("B", [r"\text{(B)}"], ["C"]),
]
TABLE["math"] = [(gold, rf"\boxed{{{found}}}", right) for gold, *boxes in MATH
                 for right, column in zip((1, 0), boxes) for found in column]
TABLE["math"] += [("1/2", text, 0) for text in (
    r"-\boxed{0.5}", r"\boxed{0.5} or \boxed{0.6}", "0.5", r"\boxed{0.5",
    r"<think>\boxed{0.5}</think>It is 0.5")]
# kinds of which every member is tried, beside a value that would be paid by mistake
LEADS = [r"\approx", r"\Rightarrow", r"\text{Answer: }",
         r"\displaystyle", r"\therefore ", r"\to", r"\implies", r"\quad",
         r"\mathrm{is}", r"\rightarrow{}", r"\color{red}", r"\;", "$", r"\(",
         r"\left(", "{", "(", "[", "_", "__", "**", "`", "=> ", "&=",
         "<b>", "{Answer: }", "&nbsp;", "→",
         r"\hspace{1mm}", r"\textbf{The answer is: }", "{}"]
APART = [f"{lead}{between}" for lead in ("is", "→", r"\approx", r"\implies", "=", "=>")
         for between in (" - ", " -\n", " -\n\n", " -\r\n", " \u2013 ", r" -\,", " **- ", " $- ",
                         r" \(- ", " -`")]
VALUES = [r"\pi-5", r"2\pi - 5", "x^{2}-5", "f(x)-5", r"\theta - 5",
          r"\sqrt{-5}", r"\log(-5)", r"\pm 5", r"\mp5", "+/- 5", "1/-5",
          "x_{-5}", "a_-5", "10^{-5}", "x - 5", r"\alpha5", r"\frac52",
          r"\text{x}-5", "<sup>-</sup>5", "{0}.5", "\n\n-\n5"]
SEPARATORS = [r",\!", r"{,}\!", r"\,\!", r",\,\!", r"\mathord{,}",
              r"\mathpunct{,}", r"\text{,}", "{,}", "{,} ",
              r"\thickspace ", r"\medspace{}", r"\thinspace ", r"\ ", r"\;",
              "~", r"{\,}", "{ , } ", r"{\small ,}", r"\hspace{1mm}",
              r"\space ", r"\kern1mu ", r",\allowbreak ", r",\negthinspace ", "_",
              "'", "’", "‘", "ʼ", "′", "´", "＇", "\u066c", "\u060c", "\u201a",
              "，", "<wbr>", ",<wbr>", "&thinsp;", "&nbsp;", "\u00a0",
              "&#8239;", "\u2007", "\u2009", "\u200a", "\u202f", "\u3000", "\u200b"]
LISTS = [",~", r",\,", r",\ ", ",&nbsp;", " ", "·", "\u2027", "\u30fb", "\u2024",
         "…", "\u0307"]
SAYS = ["Antwort: {}", "Die richtige Antwort ist {}.", "Richtige Antwort: ({})", "{} ist richtig.",
        "Also ist die Antwort ({}).", "Antwort: Option {}", "Ich wähle {}.", "**Antwort:** {}",
        "Antwort: {}, weil es so ist.", "Réponse : {}", "La bonne réponse est la {}.",
        "La réponse correcte est l'option {}.", "Réponse finale : {}",
        "Réponse : {} parce que oui", "Respuesta: {}", "La respuesta correcta es la {}.",
        "Respuesta correcta: {}", "{} es correcta.", "La opción correcta es {}.", "Risposta: {}",
        "La risposta corretta è la {}.", "Resposta: {}", "A resposta é {}.", "Antwoord: {}",
        "Odpowiedź: {}", "Svar: {}", "Cevap: {}", "Đáp án: {}", "Ответ: {}",
        "Правильный ответ — {}", "答案是 {}", "答案：{}", "正确答案是{}。", "答案是（{}）",
        "故选{}。", "答案是{}，因为。", "{}选项是正确的", "答えは{}です。", "正解は {}", "정답: {}",
        "정답은 {}입니다."]
for each in ("number", "contains"):
    TABLE[each] += [(gold, f"It is {lead}{found}" + ("}" if lead == "{" else ""), right)
                    for lead in LEADS for found, gold, right in (
                        ("-5", "-5", 1), ("-5", "5", 0), (".5", "0.5", 1), (".5", "5", 0),
                        ("\u2212.5", "-0.5", 1), ("5", "5", 1))]
    TABLE[each] += [(gold, f"The value {lead}5", right)
                    for lead in APART for gold, right in (("-5", 1), ("5", 0))]
    TABLE[each] += [(gold, f"It is {found}", 0) for found in VALUES
                    for gold in ("5", "-5")]
    TABLE[each] += [(gold, f"There are 58{mark}500 men.", right)
                    for mark in SEPARATORS
                    for gold, right in (("58500", 1), ("500", 0))]
    TABLE[each] += [(gold, f"There are 58{mark}500 men.", 0)
                    for mark in LISTS for gold in ("58500", "500")]
TABLE["boxed"] += [(gold, rf"\boxed{{58{mark}500}}", right)
                   for mark in SEPARATORS for gold, right in (("58500", 1), ("500", 0))]
TABLE["boxed"] += [(gold, rf"\boxed{{58{mark}500}}", 0)
                   for mark in LISTS for gold in ("58", "500")]
TABLE["choice"] = [(letter, text, int(letter == said)) for said, texts in CHOICES.items()
                   for text in texts for letter in "ABCDEFGHIJ"]
TABLE["choice"] += [(letter, text.format(said), int(letter == said)) for text in SAYS
                    for said in "AB" for letter in "ABC"]
TABLE["choice"] += [("(B)", "B", 1), ("Paris", "B", 0), ("", "B", 0), ("K", "K", 0),
                    ("B", "The answer is not B but C.", 0)]
# the rules get these wrong, and are left so: the value is what a teacher would pay
FOOLED = [
    ("number", "42", "42 million", 0),
    ("number", "42", "41: 42", 0),
    ("number", "2000", "$2k", 1),
    ("boxed", "42", r"\sqrt{\text{a} \boxed{42}}", 0),
    ("boxed", "42", r"\boxed{42 \text{ gross}}", 0),
    ("boxed", "42", r"Answer - \boxed{42}", 1),
    ("boxed", "42", r"\boxed{42}m", 1),
    ("boxed", "42", r"\boxed{42 \frac{\text{m}}{\text{s}}}", 1),
    ("number", "-5", r"\text{total}-5", 0),
    ("contains", "23", "It is 1,23 m.", 0),
    ("math", "42", r"\boxed{41 = 42}", 0),
    ("math", "5", r"\boxed{7 \to 5}", 0),
    ("math", "12:30", r"\boxed{2/5}", 0),
    ("choice", "B", "Vastaus: B", 1),
    ("boxed", "42", r"(2)\boxed{42}", 0),
    ("boxed", "42", r"\boxed{42}(x+1)", 0),
    ("boxed", "x^{1/2}", r"\boxed{x^\frac{1}{2}}", 1),
    ("choice", "B", "Paris (B)", 1),
    ("choice", "B", "The answer is Paris (B).", 1),
    ("choice", "B", "The answer is Paris, which is option B.", 1),
    ("choice", "I", "It is I.", 0),
    ("choice", "I", "Thus I", 0),
    ("choice", "C", "The answer is not B but C.", 1),
    ("choice", "C", "Not B. C.", 1),
    ("choice", "B", "B B B", 1),
    ("choice", "B", "A) x B) y C) z\nB) y", 1),
    ("boxed", "42", r"\boxed{42} is wrong.", 0),
    ("choice", "B", "After eliminating A and C the answer is B.", 1),
    ("choice", "J", "Answer: J. Smith", 0),
    ("choice", "E", "E. coli", 0),
    ("choice", "B", "The answer is B. C is wrong.", 1),
    ("contains", "Paris", "It is not Paris.", 0),
    ("contains", "no", "No one knows.", 0),
    ("contains", "Paris", "Rome, Paris, Bonn", 0),
]
HAS_MATH_VERIFY = importlib.util.find_spec("math_verify")  # an optional package
needs_math_verify = pytest.mark.skipif(not HAS_MATH_VERIFY,
                                       reason="math-verify is absent")
if not HAS_MATH_VERIFY:
    del TABLE["math"]
ROWS = [(rule, *row) for rule, rows in TABLE.items() for row in rows]
FOOLED = [row for row in FOOLED if row[0] in TABLE]
TEXTS = [*dict.fromkeys(text for _, _, text, _ in ROWS)]
UNREADABLE = {  # gold answers that a rule cannot read
    "exact": ["", "...", "**"], "number": ["", "Paris", "3 or 4", "1/2", "1 234", "0,500"],
    "boxed": ["", "?", r"\,"], "math": ["", "?", r"\,"],
    "choice": ["", "K", "Paris", "AB", "A or B", "2"], "contains": ["", "?", "..."]}


def judged(rule, gold, text):
    return RULES[rule](after_thought(text, thinks=False), gold)


def mistakes(judge, rows=ROWS):
    """-> the rows that judge(rule, gold, text) gets wrong"""
    return [row for row in rows if judge(*row[:3]) != bool(row[3])]


def test_the_table():
    assert mistakes(judged) == []
    assert len(set(ROWS + FOOLED)) == len(ROWS + FOOLED) > 600
    for rule in TABLE:
        right = [row[3] for row in ROWS if row[0] == rule]
        assert min(right.count(0), right.count(1)) >= 20


def test_what_fools_the_rules():
    """Mended by accident or on purpose? Then the row belongs into the table."""
    assert mistakes(judged, FOOLED) == FOOLED


@pytest.mark.parametrize("judge, least", [
    (lambda rule, gold, text: gold in text, 250),
    (lambda rule, gold, text: text.split()[-1:] == [gold], 250),
    (lambda rule, gold, text: RULES[rule](text, gold), 7)])  # no thought is left out
def test_careless_rules_are_fooled(judge, least):
    """Rules that one might write in a line."""
    assert len(mistakes(judge)) >= least


@pytest.mark.parametrize("rule", TABLE)
def test_a_gold_answer_that_cannot_be_read_earns_nothing(rule):
    for gold in UNREADABLE[rule]:
        assert not any(judged(rule, gold, text)
                       for text in [*TEXTS[::5], gold, f"\\boxed{{{gold}}}"])
    assert any(judged(rule, gold, text) for r, gold, text, _ in ROWS if r == rule)


def test_no_text_is_right_whatever_is_asked():
    """One text is one choice, one box and one last number at most; what contains everything is
    paid for everything, and is the control."""
    rng = random.Random(0)
    pieces = [*"ABCDabc().,:/\n }-", " or ", "Answer: ", "The answer is ",
              "(B)", "\\boxed{", "41", "42", "not ", "**", "\\text{",
              "is correct", " vs ", "- ", "\\frac{", "No, "]
    soups = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(250)]
    paid = Counter()
    texts = TEXTS[::6] + soups
    for text in texts:
        for rule, golds in (("choice", "ABCDEFGHIJ"),
                            ("boxed", ["41", "42", "A", "B"]),
                            ("number", ["41", "42", "-42"]),
                            ("contains", ["41", "42"])):
            paid[rule, sum(judged(rule, gold, text) for gold in golds)] += 1
    for rule in ("choice", "boxed", "number"):
        assert paid[rule, 1] > len(texts) / 50 and paid[rule, 0] + paid[rule, 1] == len(texts)
    assert paid["contains", 2] > len(texts) / 50


LONG = r"""\boxed{ \boxed{1} \text{ \frac ( { _ 42~ A~ A~or~ (B)~ it~is~B~ answer~is~
    option~ not~ /~ /( x~+~ 42~to~ _{ \textor 41.~ ' * \, -$ =~ -~ ~ is~-~ 1{,} 1\,
    1,~ 1~x~ -+ 1: 2^{ -(~ <think> \hspace{ {} 是 m~ <b~""".split()
LONG = [piece.replace("~", " ") for piece in LONG]
LONG += ["~", "\n", "B\n", "x C\n", "\u2009"]


@pytest.mark.parametrize("rule, golds", [("exact", "B"), ("number", ["42"]), ("boxed", ["42"]),
                                         ("choice", "B"), ("contains", ["B", "42"])])
def test_long_texts_take_no_time(rule, golds):
    start = time.process_time()
    for piece in LONG:
        long = piece * (2_000 // len(piece))
        for text in (long, long + "}" * 700,
                     f"\\boxed{{42{long}}}", f"\\boxed{{42}}{long}"):
            for gold in golds:
                judged(rule, gold, text)
    assert time.process_time() - start < 3


# math-verify

def asks(found, gold=r"\frac{1}{2}"):
    """Is a box with this right by the rule `math`?"""
    return RULES["math"](rf"\boxed{{{found}}}", gold)


@needs_math_verify
def test_math_verify_in_any_thread():
    """Where its own limit on time fails; signals stay as they are."""
    from math_verify import parse
    before, found = signal.getsignal(signal.SIGALRM), []

    def work():
        found.append([asks(x) for x in ("0.5", "0.6", r"\frac{3}{6}")])
        try:
            parse("$1$")
        except ValueError as e:
            found.append(str(e))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x for x in found if isinstance(x, list)] == [[True, False, True]] * 3
    assert sum("threaded" in x for x in found) == 3  # the control
    assert signal.getsignal(signal.SIGALRM) == before and len(answers.judges) == 1


@needs_math_verify
def test_what_takes_forever_is_wrong(monkeypatch):
    """As is what ends the process that compares; the next one starts another, or says that it
    cannot."""
    monkeypatch.setattr(answers, "judges", {})
    monkeypatch.setattr(answers, "JUDGE",
                        answers.JUDGE.replace("PROF, 3)", "PROF, .5)"))
    assert "PROF, .5)" in answers.JUDGE and asks("0.5")
    first, = answers.judges.values()
    assert not asks("9^{9^{9^{9}}}", "7") and first.poll() == -signal.SIGPROF
    assert asks("0.5") and not asks("0.6")
    second, = answers.judges.values()
    second.communicate("")  # ends it
    assert second is not first
    monkeypatch.setattr(answers, "JUDGE", "import nobodys_module")
    with pytest.raises(ValueError, match="reward=math needs the package math-verify"):
        asks("0.5")
    assert RULES["math"](r"\boxed{42}", "42")  # what needs no package
