"""What the user says in `krul demo`: a dog is named, a journey told, and the dog asked for.

Fixed texts, so that two runs are the same chat: about 2,070 tokens with the answers.
"""

from __future__ import annotations

__all__ = ["FINAL_QUESTION", "USER_TURNS", "WARM_UP"]

WARM_UP = "Which is the largest planet of the solar system, and how many moons does it have?"

USER_TURNS = (
    "The name of my dog is Biscuit. What is the name of my dog?",
    """\
The first part goes from Lisbon to Paris. I leave on a Monday morning in the first week of May, when \
the light over the river is still soft and the cafes near the station open their shutters. There is no \
direct line any more, so I ride north along the coast to Porto, change there to the old line over the \
bridge, and cross the border in a small diesel train that stops at every village. In Vigo I have two \
hours, enough for a walk to the harbour, a plate of mussels and a look at the ferries that go out to \
the islands. In the evening I go on to Madrid and sleep near the station of Chamartin, because the \
train to Barcelona leaves at half past six. From Barcelona the fast train runs along the lagoons to \
Perpignan and Montpellier, where flamingos stand in the shallow water, and arrives in Paris in the \
middle of the afternoon. I want to stay in Paris for two nights, in a small hotel near the Gare de \
l'Est, and I would like to see the museum of arts and crafts, where the old pendulum of Foucault \
hangs, and the covered passages near the boulevards. My sister lives there and will come to dinner on \
Wednesday; she does not eat meat, so I look for a place with a good vegetable kitchen. I carry one \
suitcase and a small rucksack with my camera.

In which city does my sister live?""",
    """\
Now the second part, from Paris to Copenhagen. On Thursday morning I take the train from the Gare de \
l'Est to Strasbourg, which needs less than two hours. I leave my suitcase in a locker there, climb the \
tower of the cathedral, look at the astronomical clock at noon when the apostles pass by, and eat an \
onion tart in one of the lanes near the water. Then I cross the Rhine to Offenburg and ride north \
through the valley to Frankfurt, where I change to the train to Hamburg. It arrives at a quarter past \
nine in the evening. In Hamburg I stay for three nights with an old friend from my years at the \
university. He works on the container ships as an engineer, and he has promised to show me the harbour \
from a launch, early in the morning when the big ships turn with the tide. On Saturday we want to hear \
a concert in the new hall above the river; he has bought two tickets for the upper rows, where the \
sound is said to be best. On Sunday there is the fish market, which begins at five, and afterwards we \
will probably sleep until noon. On Monday I go on to Copenhagen. The train no longer goes onto the \
ferry, as it did when I was a child and we stood at the rail and watched the wagons roll into the \
ship; it goes over the long bridges of Denmark now, by way of Odense, where Andersen was born. I have \
a seat at a window on the left side, because the sea is to be seen from there.

In which city does my old friend live?""",
    """\
The third part goes from Copenhagen to Stockholm. I stay in Copenhagen for two nights in a youth \
hostel near the lakes; it was a hospital once and has high windows and a garden with bees. I want to \
rent a bicycle, ride out along the coast to the museum of modern art at Humlebaek, have a sandwich on \
the lawn above the Sound, and look over to Sweden. On the second day I will see the round tower, which \
has no stairs but a ramp that winds up seven times, so that the king could ride up in a coach. On \
Wednesday the train takes me across the bridge to Malmo and then through the woods of Smaland to \
Stockholm, more than five hours. My father worked as a young man in a glass factory in those woods, \
and I would like to get off at a small station called Nassjo, take the branch line to the village and \
look for the house where he had his room. I have a photograph of it from the year 1961: a red wooden \
house with white corners, an apple tree and a dog. If the house is still there I will take the same \
picture again for my sister. I have reserved a bed in the inn of the village, and the landlady has \
written that she knows an old man who remembers the people of the factory. On Friday I go on to \
Stockholm, where I have a cabin on a ship that lies at the quay of the old town and serves as a hotel. \
The cabin is small, but it looks out on the castle.

In which year was the photograph taken?""",
    """\
The last part goes from Stockholm to Helsinki. On Saturday I walk through the old town, visit the \
museum of the warship that sank on her first voyage in 1628 after less than a mile, and buy bread, \
cheese and a jar of cloudberries in the market hall. In the evening, at a quarter to five, the ferry \
leaves for Turku. It needs eleven hours, and for the first three it passes through the islands, \
thousands of them, some with a summer house and a flag, some with nothing but a pine and a gull. I \
have taken a cabin with a window for that reason, and I will stand on deck as long as there is light, \
which in May is until ten. The ship puts in at Mariehamn at night. In Turku the train stands beside \
the quay at seven in the morning, so that one only has to cross the platform, and it reaches Helsinki \
at half past nine. There I will stay for four nights with a family that I know from letters: we have \
exchanged stamps and stories for twenty years and have never met. They have a sauna at a lake an hour \
north of the city and have asked whether I am afraid of cold water. I have written back that I am, but \
that I will come along. On the way home I take an aeroplane, for the first time on this journey, \
because my holidays end on the Thursday, and I have to be at my desk on Friday at eight. That is the \
whole journey.

In which city is the family that I know from letters?""",
    """\
I forgot to tell you how I prepare for it. In March I buy the ticket, which is valid for fifteen days \
of travel within two months, and reserve the seats on the fast trains, because they are full in May. I \
write the times of all the trains on one sheet of strong paper, with the next two trains after each of \
them, so that I need no telephone when one is late. My suitcase is brown and older than I am; my \
mother packed it when she went to sea as a cook. I put two jerseys into it, a raincoat, a pair of \
strong shoes, a dark suit for the concert, four books and a tin of sardines for the family in \
Helsinki, because they have asked for something from Lisbon. The camera takes twelve pictures on a \
film, and I have ten films, so that I must think before I press the button. My neighbour, who was a \
postman for forty years, waters the plants and collects the letters while I am away. He has asked me \
for a stamp from each of the countries, with the mark of a post office on it, and has made a list of \
the ones that he has already. My desk at the office is taken by a young colleague, who is clever but \
forgets to close the windows. I have told her where the keys are and which of the customers want to be \
called on the telephone rather than written to.

What colour is my suitcase?""",
    """\
And this is what I want to do when I am home again. I will have the films developed at the shop beside \
the market, where the owner still does it himself in the room at the back, and choose the best twenty \
pictures with my daughter on a Sunday afternoon. We will glue them into a book with a grey cover and \
write beside each of them where it was taken and what cannot be seen in it: the smell of the harbour, \
the noise of the gulls, the taste of the tart. The first copy is for my sister in Paris, the second \
for my friend in Hamburg, and the third for the family in Helsinki. I will also write down what the \
old man in the village has told me about the glass factory, and send it to the museum there, because \
nobody else seems to have asked him. Then I will begin to plan the next journey. I think of the \
railway along the Danube, from the springs in the forest to the sea, through ten countries, with a \
stop in each of the four capitals that lie on its banks. It would take three weeks, and I have only \
two, so that I will either have to ask for a longer holiday or go no further than Belgrade. My \
neighbour says that one should never travel to the end of a river, because then there is nothing left \
to go back for. I do not know whether he is right, but I like the thought.

Along which river do I want to travel next?""",
)

FINAL_QUESTION = "What is the name of my dog?"
