"""Chats in Spanish, out of domain: exchanges written for this benchmark, in an order of each chat. Pure.

The ShareGPT set was filtered for English by those who made it; what is left of other languages makes no set.
"""

from __future__ import annotations

import random

from benchmarks.quality_chats import Chat, Message, Turn

__all__ = ["EXCHANGES", "spanish_chats"]

HISTORY = 5  # exchanges: about 1,000 tokens

EXCHANGES: tuple[tuple[str, str], ...] = (
    (
        "¿Cómo puedo cuidar un olivo en una maceta?",
        "Un olivo vive bien en una maceta si tiene mucho sol y una tierra que no guarde demasiada agua. "
        "Conviene regarlo cuando los primeros centímetros de tierra estén secos, y dejar que el agua "
        "salga por abajo. En primavera se puede abonar una vez al mes. La poda se hace al final del "
        "invierno: se quitan las ramas que se cruzan y las que crecen hacia dentro, para que entre la luz"
        " en la copa.",
    ),
    (
        "Explícame por qué el mar es salado.",
        "La lluvia disuelve poco a poco los minerales de las rocas, y los ríos los llevan hasta el mar. "
        "El agua se evapora y vuelve a las montañas en forma de nubes, pero las sales no se evaporan y se"
        " quedan. A esto se suma lo que sale de los volcanes y de las grietas del fondo. Después de "
        "muchos millones de años se ha llegado a un equilibrio, y por cada litro de agua hay unos treinta"
        " y cinco gramos de sal.",
    ),
    (
        "¿Qué hago en Granada si solo tengo un día?",
        "Empieza temprano por la Alhambra, con la entrada comprada unos días antes, porque por la mañana "
        "hay menos gente y hace menos calor. Después baja andando por el bosque hasta la ciudad y come "
        "algo cerca de la plaza. Por la tarde sube por las calles blancas del Albaicín hasta el mirador, "
        "desde donde se ve todo el palacio con la sierra detrás. Si te quedan fuerzas, termina el día con"
        " unas tapas en el centro.",
    ),
    (
        "¿Cómo se prepara una tortilla de patatas?",
        "Pela las patatas, córtalas en láminas finas y fríelas despacio en aceite de oliva con una "
        "cebolla, hasta que estén blandas. Bate los huevos en un plato hondo, añade las patatas bien "
        "escurridas y deja que la mezcla repose diez minutos. Luego échala en una sartén con muy poco "
        "aceite. Cuando los bordes estén hechos, dale la vuelta con un plato y cocina el otro lado un par"
        " de minutos, para que quede jugosa por dentro.",
    ),
    (
        "¿Por qué es bueno dormir ocho horas?",
        "Mientras dormimos el cerebro ordena lo que hemos aprendido durante el día y se deshace de lo que"
        " no necesita. También el cuerpo descansa: baja la presión, se reparan los músculos y se regulan "
        "las hormonas que controlan el hambre. Quien duerme poco durante muchas semanas se concentra peor"
        " y enferma con más facilidad. No todo el mundo necesita lo mismo, pero entre siete y nueve horas"
        " es lo normal para un adulto.",
    ),
    (
        "Dame consejos para hablar en público sin nervios.",
        "Lo más importante es conocer bien el tema y haber ensayado en voz alta, mejor delante de un "
        "amigo. Aprende de memoria la primera frase, porque el principio es lo más difícil. Respira "
        "despacio antes de empezar y busca entre el público a dos o tres personas que te escuchen con "
        "atención. Si te equivocas, sigue adelante con calma: casi nadie se da cuenta, y una pausa breve "
        "parece siempre más larga a quien habla.",
    ),
    (
        "¿Cómo funciona una bicicleta eléctrica?",
        "Una bicicleta eléctrica tiene un motor pequeño, una batería y unos sensores que miden la fuerza "
        "con la que se pedalea. Cuando el ciclista empuja los pedales, el motor añade una parte de la "
        "fuerza, y cuando deja de pedalear o pasa de cierta velocidad, se apaga. Por eso sigue siendo una"
        " bicicleta y no una moto. La batería se carga en casa en unas horas y da para cincuenta "
        "kilómetros o más, según las cuestas y el peso.",
    ),
    (
        "¿Qué diferencia hay entre una novela y un cuento?",
        "Un cuento suele leerse de una vez y se ocupa de un solo suceso, con pocos personajes y un final "
        "que da sentido a todo lo anterior. La novela tiene más espacio: puede seguir a una familia "
        "durante años, cambiar de lugar y de voz, y detenerse en cosas que no hacen avanzar la historia. "
        "Un escritor dijo que la novela gana por puntos, mientras que el cuento tiene que ganar de un "
        "solo golpe.",
    ),
    (
        "¿Cuándo se plantan los tomates y cómo se riegan?",
        "Los tomates se siembran en un lugar protegido al final del invierno y se llevan a la huerta "
        "cuando ya no hay peligro de heladas. Se plantan hondos, con una caña al lado para que suban, y "
        "con medio metro entre una mata y la otra. El riego debe ser regular y sin mojar las hojas, "
        "porque así se evitan los hongos. Cuando la planta tiene cuatro o cinco ramos se corta la punta, "
        "y los frutos maduran antes y salen más grandes.",
    ),
    (
        "Cuéntame algo sobre la historia del chocolate.",
        "El cacao se bebía en México mucho antes de que llegaran los españoles, mezclado con agua, maíz y"
        " chile, y sus granos servían también de moneda. En Europa se empezó a tomar caliente y con "
        "azúcar, y durante mucho tiempo fue una bebida de ricos. Solo en el siglo diecinueve se aprendió "
        "a separar la manteca del cacao, y con ella se hicieron las primeras tabletas. Hoy la mayor parte"
        " del cacao se cultiva en el oeste de África.",
    ),
)


def spanish_chats(count: int, seed: int) -> list[Chat]:
    """`count` chats of five exchanges and a last one."""
    chats = []
    for number in range(count):
        drawn = random.Random(f"spanish {number} {seed}").sample(EXCHANGES, HISTORY + 1)
        history = tuple(
            message
            for question, answer in drawn[:HISTORY]
            for message in (Message("user", question), Message("assistant", answer))
        )
        chats.append(Chat(f"spanish-{number}", "spanish", history, (Turn(*drawn[HISTORY]),)))
    return chats
