//! The JSON text of a header, read as a stream.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{
    HeaderError,
    header::{MAX_RANK, METADATA},
};
use crate::error::shown;

/// One entry as it stands in the file.
pub(super) struct RawTensor {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) begin: u64,
    pub(super) end: u64,
}

/// The JSON as it stands in the file.
#[derive(Default)]
pub(super) struct RawHeader {
    pub(super) tensors: Vec<RawTensor>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Reads the JSON and checks that names are unique; nothing else.
pub(super) fn parse_json(json: &[u8]) -> Result<RawHeader, HeaderError> {
    let used = json.iter().rposition(|b| !matches!(b, b' ' | 0)).map_or(0, |i| i + 1);
    let mut problem = None;
    let mut de = serde_json::Deserializer::from_slice(&json[..used]);
    let header = HeaderSeed { problem: &mut problem }.deserialize(&mut de).and_then(|h| de.end().map(|()| h));
    match (header, problem) {
        (_, Some(problem)) => Err(problem),
        (Ok(header), None) => check_names(header),
        (Err(e), None) => Err(HeaderError::Json { message: shown_message(&e.to_string()) }),
    }
}

/// Names are unique. Sorting finds a repetition without a second copy of the names.
fn check_names(mut header: RawHeader) -> Result<RawHeader, HeaderError> {
    header.tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = header.tensors.windows(2).find(|w| w[0].name == w[1].name) {
        return Err(HeaderError::DuplicateKey { name: shown(&pair[0].name) });
    }
    Ok(header)
}

/// A JSON error may quote the file: one line, cut in the middle so that line and column at its end stay.
pub(crate) fn shown_message(message: &str) -> String {
    let split = message.rfind(" at line ").unwrap_or(message.len());
    format!("{}{}", shown(&message[..split]), shown(&message[split..]))
}

/// The whole header. serde's errors are text; `problem` carries a typed one around it.
struct HeaderSeed<'a> {
    problem: &'a mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = RawHeader;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<RawHeader, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to descriptions")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader::default();
        let mut seen_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                if seen_metadata {
                    *self.problem = Some(HeaderError::DuplicateKey { name });
                    return Err(de::Error::custom("duplicate key"));
                }
                seen_metadata = true;
                header.metadata = map.next_value_seed(MetadataSeed { problem: &mut *self.problem })?;
            } else {
                // The error of a value gets the tensor's name; serde_json keeps its line and column.
                let tensor = match map.next_value::<Fields>() {
                    Ok(fields) => fields.named(name),
                    Err(e) => return Err(de::Error::custom(format!("tensor `{}`: {e}", shown(&name)))),
                };
                header.tensors.push(tensor);
            }
        }
        Ok(header)
    }
}

struct MetadataSeed<'a> {
    problem: &'a mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = BTreeMap<String, String>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`__metadata__`, an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        let mut wrong = None;
        let mut fields_of_a_tensor = 0;
        while let Some(key) = map.next_key::<String>()? {
            fields_of_a_tensor += usize::from(matches!(key.as_str(), "dtype" | "shape" | "data_offsets"));
            match map.next_value::<MetadataValue>()? {
                MetadataValue::Text(value) => match metadata.entry(key) {
                    Entry::Vacant(slot) => {
                        slot.insert(value);
                    }
                    Entry::Occupied(slot) => {
                        wrong.get_or_insert(HeaderError::DuplicateKey {
                            name: format!("__metadata__.{}", shown(slot.key())),
                        });
                    }
                },
                MetadataValue::Other(found) => {
                    wrong.get_or_insert(HeaderError::MetadataNotString { key: shown(&key), found });
                }
            }
        }
        if let Some(wrong) = wrong {
            *self.problem = Some(if fields_of_a_tensor == 3 { HeaderError::ReservedName } else { wrong });
            return Err(de::Error::custom("bad metadata"));
        }
        Ok(metadata)
    }
}

enum MetadataValue {
    Text(String),
    Other(&'static str),
}

impl<'de> de::Deserialize<'de> for MetadataValue {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = MetadataValue;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E>(self, v: &str) -> Result<MetadataValue, E> {
                Ok(MetadataValue::Text(v.to_owned()))
            }
            fn visit_bool<E>(self, _: bool) -> Result<MetadataValue, E> {
                Ok(MetadataValue::Other("a truth value"))
            }
            fn visit_i64<E>(self, _: i64) -> Result<MetadataValue, E> {
                Ok(MetadataValue::Other("a number"))
            }
            fn visit_u64<E>(self, _: u64) -> Result<MetadataValue, E> {
                Ok(MetadataValue::Other("a number"))
            }
            fn visit_f64<E>(self, _: f64) -> Result<MetadataValue, E> {
                Ok(MetadataValue::Other("a number"))
            }
            fn visit_unit<E>(self) -> Result<MetadataValue, E> {
                Ok(MetadataValue::Other("null"))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MetadataValue, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(MetadataValue::Other("a list"))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MetadataValue, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(MetadataValue::Other("an object"))
            }
        }
        d.deserialize_any(V)
    }
}

/// The fields of one tensor; unknown ones are skipped, as the reference reader does.
struct Fields {
    dtype: String,
    shape: Vec<u64>,
    offsets: [u64; 2],
}

impl Fields {
    fn named(self, name: String) -> RawTensor {
        RawTensor { name, dtype: self.dtype, shape: self.shape, begin: self.offsets[0], end: self.offsets[1] }
    }
}

impl<'de> de::Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Fields;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let (mut dtype, mut shape, mut offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "dtype" => once(&mut dtype, map.next_value()?, "dtype")?,
                        "shape" => once(&mut shape, map.next_value::<Extents>()?.0, "shape")?,
                        "data_offsets" => once(&mut offsets, map.next_value()?, "data_offsets")?,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(Fields {
                    dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
                    offsets: offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?,
                })
            }
        }
        d.deserialize_map(V)
    }
}

fn once<T, E: de::Error>(slot: &mut Option<T>, value: T, field: &'static str) -> Result<(), E> {
    if slot.replace(value).is_some() { Err(E::duplicate_field(field)) } else { Ok(()) }
}

/// A list of extents of at most [`MAX_RANK`] entries.
struct Extents(Vec<u64>);

impl<'de> de::Deserialize<'de> for Extents {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Extents;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of extents")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Extents, A::Error> {
                let mut extents = Vec::new();
                while let Some(extent) = seq.next_element()? {
                    if extents.len() == MAX_RANK {
                        return Err(de::Error::custom(format_args!("more than {MAX_RANK} extents")));
                    }
                    extents.push(extent);
                }
                Ok(Extents(extents))
            }
        }
        d.deserialize_seq(V)
    }
}
