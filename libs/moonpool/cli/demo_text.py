"""The conversation that `moonpool demo` continues: over 1,000 tokens, written for it.

Short questions with answers of three plain sentences, so that a small model has an example to follow
and answers the last one sensibly.
"""

from __future__ import annotations

from moonpool.inference.generation import ChatMessage

TITLE = "a conversation about the sea"

TURNS: tuple[tuple[str, str], ...] = (
    (
        "What is a lighthouse?",
        "A lighthouse is a tall tower with a bright light at the top. It stands near the coast or on a "
        "rock in the sea, and its light shows sailors where the land is. In the past a keeper lived "
        "there and lit the lamp every evening, but today most lighthouses work by themselves.",
    ),
    (
        "What is a harbour?",
        "A harbour is a place on the coast where ships can stay safely. Walls of stone or the shape of "
        "the land protect it from the wind and the waves. Ships come into the harbour to load and "
        "unload goods, to be repaired, or to wait until a storm is over.",
    ),
    (
        "What is an anchor?",
        "An anchor is a heavy piece of metal that is tied to a ship with a chain or a rope. When it is "
        "dropped, it sinks to the bottom of the sea and digs into the sand or the mud. It keeps the "
        "ship in its place, so that the wind and the water do not carry it away.",
    ),
    (
        "What is a compass?",
        "A compass is a tool that shows which way is north. It has a small magnetic needle that can "
        "turn freely and that follows the magnetic field of the Earth. Sailors use a compass to find "
        "their way when they cannot see the land, the sun or the stars.",
    ),
    (
        "What is a tide?",
        "A tide is the slow rising and falling of the sea along the coast. It is caused mostly by the "
        "gravity of the Moon, which pulls on the water of the oceans. Most coasts have two high tides "
        "and two low tides every day.",
    ),
    (
        "What is a wave?",
        "A wave is a movement that travels across the surface of the water. Most waves are made by the "
        "wind, which pushes the water up and down as it blows over the sea. When a wave comes to "
        "shallow water near the beach, it becomes slower and higher, and then it breaks.",
    ),
    (
        "What is a whale?",
        "A whale is a very large animal that lives in the ocean. It looks like a fish, but it is a "
        "mammal: it breathes air, it has warm blood, and it feeds its young with milk. The blue whale "
        "is the largest animal on Earth and can be thirty metres long.",
    ),
    (
        "What is a seagull?",
        "A seagull is a bird that lives near the sea. It has white and grey feathers, strong wings and "
        "a loud voice, and it eats fish, crabs, insects and almost anything else that it can find. "
        "Seagulls build their nests on cliffs, on islands and sometimes on the roofs of houses.",
    ),
    (
        "What is a coral reef?",
        "A coral reef is a large structure under the water that is built by very small animals called "
        "corals. Over many years their hard skeletons grow together and form walls and hills on the "
        "sea floor. Reefs lie in warm and clear water, and thousands of kinds of fish live in them.",
    ),
    (
        "What is an island?",
        "An island is a piece of land that has water on all sides. Some islands were once part of the "
        "mainland, and others were made by volcanoes that grew up from the bottom of the sea. Islands "
        "can be so small that nobody lives there, or as large as Greenland.",
    ),
    (
        "What is a submarine?",
        "A submarine is a ship that can travel under the water. It has large tanks: when they are "
        "filled with water the submarine sinks, and when they are filled with air it rises again. "
        "Submarines are used by navies, and also by scientists who study the deep sea.",
    ),
    (
        "What is an iceberg?",
        "An iceberg is a large piece of ice that has broken off a glacier and floats in the sea. Ice is "
        "a little lighter than water, so only a small part of an iceberg can be seen, and the rest of "
        "it is below the surface. Icebergs are dangerous for ships, which must keep away from them.",
    ),
    (
        "What is a storm?",
        "A storm is very bad weather with strong wind and often with rain, snow or thunder. It forms "
        "where warm and cold air meet and the pressure of the air becomes low. At sea a storm makes "
        "high waves, and small boats must return to the harbour before it comes.",
    ),
    (
        "What is a map?",
        "A map is a picture of a part of the Earth as it looks from above. It shows where the land, the "
        "water, the roads and the towns are, and how far it is from one place to another. A map for "
        "sailors is called a chart, and it also shows how deep the water is.",
    ),
)

QUESTION = "What is a cloud?"


def demo_messages() -> tuple[ChatMessage, ...]:
    """The whole conversation; the last question is open."""
    history = [
        message
        for question, answer in TURNS
        for message in (
            ChatMessage(role="user", content=question),
            ChatMessage(role="assistant", content=answer),
        )
    ]
    return (*history, ChatMessage(role="user", content=QUESTION))
