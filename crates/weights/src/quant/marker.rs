//! What a file says about the format of its quantised matrices: JSON in a side tensor (`comfy_quant`) or in the metadata
//! (`_quantization_metadata`).
//!
//! Sources: Comfy-Org/ComfyUI (QUANTIZATION.md, comfy/ops.py), black-forest-labs' fp8 files.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::safetensors::shown_message;

/// Key of the metadata that describes all matrices of a file.
pub(super) const METADATA_KEY: &str = "_quantization_metadata";

/// Longest JSON of one matrix, in bytes. Those of published files have 72.
pub(super) const MAX_MARKER: usize = 64 << 10;

/// Group of a rotation where the file does not say.
const DEFAULT_GROUP: usize = 256;

/// Columns that share a scale in the 4-bit formats, where the file does not say.
const DEFAULT_SCALE_GROUP: usize = 16;

/// The description of one matrix. Keys that it does not have here are passed over, as the reference loader does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Marker {
    /// Name of the format.
    pub(super) format: String,
    /// Group of the rotation, if the matrix is rotated.
    pub(super) group: Option<usize>,
    /// Group of the rotation, whether or not `convrot` is set: some formats are always rotated.
    pub(super) group_if_rotated: usize,
    /// Columns that share a scale.
    pub(super) scale_group: usize,
    /// Products are to be computed in floating point.
    pub(super) full_precision: bool,
}

impl Marker {
    /// From the bytes of a side tensor; blanks and NULs after the text are padding.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_MARKER {
            return Err(format!("of {} bytes is longer than the limit of {MAX_MARKER}", bytes.len()));
        }
        let end = bytes.iter().rposition(|b| !b.is_ascii_whitespace() && *b != 0).map_or(0, |last| last + 1);
        match serde_json::from_slice(&bytes[..end]) {
            Ok(Value::Object(fields)) => Self::from_fields(&fields),
            Ok(_) => Err("is no JSON object".to_owned()),
            Err(e) => Err(format!("is no JSON: {}", shown_message(&e.to_string()))),
        }
    }

    fn from_fields(fields: &Map<String, Value>) -> Result<Self, String> {
        // Some writers put everything but the format one level down.
        let params = fields.get("params").and_then(Value::as_object);
        let field = |key: &str| fields.get(key).or_else(|| params?.get(key)).filter(|value| !value.is_null());
        let flag = |key: &str| match field(key) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(_) => Err(format!("has a `{key}` that is not true or false")),
        };
        let extent = |key: &str, default: usize| match field(key) {
            None => Ok(default),
            Some(value) => value
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|&n| n > 0)
                .ok_or_else(|| format!("has a `{key}` that is not a positive whole number")),
        };
        let format = match field("format") {
            Some(Value::String(format)) => format.clone(),
            Some(_) => return Err("has a `format` that is not a string".to_owned()),
            None => return Err("has no `format`".to_owned()),
        };
        let group = extent("convrot_groupsize", DEFAULT_GROUP)?;
        Ok(Self {
            format,
            group: flag("convrot")?.then_some(group),
            group_if_rotated: group,
            scale_group: extent("group_size", DEFAULT_SCALE_GROUP)?,
            full_precision: flag("full_precision_matrix_mult")?,
        })
    }
}

/// The markers of a file's metadata, by the matrix's name without `.weight`.
pub(super) fn from_metadata(text: &str) -> Result<HashMap<String, Marker>, String> {
    let value: Value =
        serde_json::from_str(text).map_err(|e| format!("is no JSON: {}", shown_message(&e.to_string())))?;
    let Some(layers) = value.get("layers").and_then(Value::as_object) else {
        return Err("has no object `layers`".to_owned());
    };
    let mut markers = HashMap::with_capacity(layers.len());
    for (name, layer) in layers {
        let marker = match layer {
            Value::Object(fields) => Marker::from_fields(fields),
            _ => Err("is no JSON object".to_owned()),
        };
        let marker =
            marker.map_err(|problem| format!("has an entry for `{}` that {problem}", crate::error::shown(name)))?;
        markers.insert(name.clone(), marker);
    }
    Ok(markers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Marker {
        Marker::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn markers_of_all_writers_are_read() {
        let plain = parse(r#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":64}"#);
        assert_eq!((plain.format.as_str(), plain.group, plain.full_precision), ("int8_tensorwise", Some(64), false));
        // One level down, top level first; padding; unknown keys.
        let nested =
            r#"{"format":"x","convrot_groupsize":16,"per_row":[1,{}],"params":{"convrot":true,"convrot_groupsize":4}}"#;
        assert_eq!(parse(&format!("{nested} \0\0")).group, Some(16));
        // Without a size the group is 256; without the flag there is no rotation.
        assert_eq!(parse(r#"{"format":"x","convrot":true}"#).group, Some(256));
        assert_eq!(parse(r#"{"format":"x","convrot":false,"convrot_groupsize":64}"#).group, None);
        assert_eq!(parse(r#"{"format":"x","convrot_groupsize":64}"#).group_if_rotated, 64);
        assert!(parse(r#"{"format":"x","full_precision_matrix_mult":true}"#).full_precision);
        assert_eq!(parse(r#"{"format":"x","convrot":null,"group_size":32}"#).scale_group, 32);
    }

    #[test]
    fn bad_markers_are_refused() {
        for (text, word) in [
            ("", "no JSON"),
            ("[1]", "no JSON object"),
            ("{\"format\":", "no JSON"),
            ("{}", "no `format`"),
            (r#"{"format":3}"#, "not a string"),
            (r#"{"format":"x","convrot":1}"#, "not true or false"),
            (r#"{"format":"x","convrot_groupsize":"256"}"#, "positive whole number"),
            (r#"{"format":"x","convrot_groupsize":0}"#, "positive whole number"),
            (r#"{"format":"x","convrot_groupsize":-4}"#, "positive whole number"),
            (r#"{"format":"x","convrot_groupsize":1e30}"#, "positive whole number"),
        ] {
            let problem = Marker::parse(text.as_bytes()).unwrap_err();
            assert!(problem.contains(word) && !problem.contains('\n'), "{text}: {problem}");
        }
        assert!(Marker::parse(&vec![b' '; MAX_MARKER + 1]).unwrap_err().contains("longer"));
        assert!(Marker::parse(&vec![b'['; MAX_MARKER]).is_err());
    }

    #[test]
    fn metadata_describes_all_layers() {
        let text = r#"{"format_version":"1.0","layers":{"a.b":{"format":"float8_e4m3fn"},"c":{"format":"x"}}}"#;
        let markers = from_metadata(text).unwrap();
        assert_eq!(markers.len(), 2);
        assert_eq!(markers["a.b"].format, "float8_e4m3fn");
        for (text, word) in [
            ("x", "no JSON"),
            ("{}", "`layers`"),
            (r#"{"layers":[]}"#, "`layers`"),
            (r#"{"layers":{"a\nb":3}}"#, "a\\u{a}b"),
            (r#"{"layers":{"a":{}}}"#, "no `format`"),
        ] {
            assert!(from_metadata(text).is_err_and(|e| e.contains(word)), "{text}");
        }
    }
}
