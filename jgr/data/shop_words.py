# SPDX-License-Identifier: Apache-2.0
"""The words of the synthetic shop. A category's lines are in the order in which people tend to buy them."""

COLOURS = (
    "Amber Ash Azure Bronze Charcoal Cobalt Copper Coral Crimson Ebony Emerald Fern "
    "Graphite Indigo Ivory Jade Lilac Mint Ochre Olive Pearl Sand Slate Teal"
).split()

# (category, styles, lines with their usual price)
CATEGORIES = (
    (
        "Phones",
        "Slim Mini Ultra Neo Classic Rugged",
        "Phone 480, Phone Case 18, Fast Charger 24, Screen Protector 9, Power Bank 32, Wireless Earbuds 70",
    ),
    (
        "Running",
        "Trail Road Sprint Marathon Tempo Aero",
        "Running Shoe 95, Running Sock 12, Jersey 28, Sports Watch 180, Bottle Belt 25, Foam Roller 22",
    ),
    (
        "Cycling",
        "Gravel City Alpine Race Touring Urban",
        "Bicycle 650, Bike Helmet 60, Bike Light 30, Bike Lock 40, Floor Pump 35, Cycling Glove 22",
    ),
    (
        "Photography",
        "Studio Travel Compact Prime Field Vintage",
        "Camera 700, Camera Lens 320, Memory Card 25, Camera Bag 65, Tripod 90, Lens Filter 28",
    ),
    (
        "Coffee",
        "Barista Home Alpine Velvet Morning Noir",
        "Espresso Machine 260, Coffee Grinder 90, Filter Coffee 14, Milk Jug 18, Mocha Cup 16, Descaler 11",
    ),
    (
        "Baking",
        "Rustic Artisan Family Classic Festive Pro",
        "Stand Mixer 220, Mixing Bowl 24, Cake Tin 16, Piping Set 19, Cake Stand 29, Cookie Cutter 8",
    ),
    (
        "Gardening",
        "Cottage Balcony Orchard Meadow Urban Heritage",
        "Raised Bed 85, Potting Soil 12, Seed Box 6, Watering Can 21, Pruning Shear 26, Plant Label 5",
    ),
    (
        "Painting",
        "Atelier Student Plein Studio Master Pocket",
        "Easel 75, Canvas 18, Acrylic Set 32, Brush Set 20, Palette Knife 9, Varnish 13",
    ),
    (
        "Camping",
        "Summit Basecamp Ridge River Nordic Scout",
        "Tent 190, Sleeping Bag 85, Camping Mat 45, Camp Stove 55, Mess Kit 24, Head Torch 27",
    ),
    (
        "Fishing",
        "River Coastal Lake Carbon Heritage Deepwater",
        "Fishing Rod 80, Fishing Reel 65, Fishing Line 12, Lure Set 18, Tackle Box 30, Landing Net 26",
    ),
    (
        "Music",
        "Acoustic Concert Jazz Folk Studio Parlour",
        "Guitar 280, Guitar String 9, Clip Tuner 15, Guitar Strap 20, Guitar Stand 25, Plectrum Set 6",
    ),
    (
        "Gaming",
        "Arcade Stealth Titan Pixel Nova Orbit",
        "Console 420, Game Controller 55, Gaming Headset 80, Game Dock 28, Gaming Chair 210, Thumb Grip 7",
    ),
    (
        "Baby",
        "Cloud Bunny Starlight Cosy Woodland Little",
        "Stroller 330, Rain Cover 24, Changing Bag 48, Baby Bottle 11, Bottle Warmer 34, Teething Ring 8",
    ),
    (
        "Pets",
        "Happy Wild Cosy Forest Urban Gentle",
        "Dog Bed 55, Dog Lead 18, Food Bowl 14, Chew Toy 9, Grooming Brush 16, Treat Pouch 12",
    ),
    (
        "Sewing",
        "Vintage Couture Quilter Nordic Tailor Everyday",
        "Sewing Machine 230, Thread Set 16, Cotton Fabric 21, Fabric Shear 24, Pin Cushion 7, Zip Pack 6",
    ),
    (
        "Workshop",
        "Heavy Compact Carpenter Precision Trade Garage",
        "Cordless Drill 130, Drill Bit Set 28, Screw Box 13, Tool Belt 36, Spirit Level 22, Clamp Pair 19",
    ),
)

NAMES = (
    "Ada Björn Chloé Dmitri Elif Farid Greta Hiro Ines Jonas Kavya Liam Mei Noor Oskar Priya Quentin "
    "Rosa Samir Tomás Uma Viktor Wanda Ximena Yusuf Zofia Amara Bruno Camila Daniel Esther Felix Gwen "
    "Hassan Ivana Jamal Kirsten Leila Mateo Nadia Owen Paula Rafael Saoirse Thandi Ulrik Vera Wei Yara Zane"
).split()
